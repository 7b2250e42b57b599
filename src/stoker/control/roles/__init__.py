"""Runs several programs as one job: each role is a separate run with rules for its start, health and restart."""
