"""The step, its lines and its metrics."""
