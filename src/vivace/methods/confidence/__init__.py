"""CALM and LITE: tokens leave early by the confidence of an exit."""
