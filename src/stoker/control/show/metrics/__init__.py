"""Prometheus: a snapshot as metrics, and the small server that hands them out."""
