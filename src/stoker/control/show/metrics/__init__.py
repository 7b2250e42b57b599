"""Prometheus: the snapshot as metrics, and the small server that serves them."""
