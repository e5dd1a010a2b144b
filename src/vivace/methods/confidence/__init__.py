"""CALM and LITE: tokens exit early where the confidence at an exit layer is high enough."""
