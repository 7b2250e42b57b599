"""Exports snapshots as Prometheus metrics, with the small server that serves them."""
