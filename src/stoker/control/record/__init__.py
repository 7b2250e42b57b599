"""The run directory: writing it, reading it back, listing and pruning runs."""
