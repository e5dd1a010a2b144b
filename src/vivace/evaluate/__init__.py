"""Measurement of quality and speed: task data, metrics, and the benchmark harness."""
