"""Quality and speed, measured: task data, metrics, and the bench."""
