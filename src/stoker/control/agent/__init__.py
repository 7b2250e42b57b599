"""The agent of one host: starts, watches, stops and sweeps that host's ranks. Standard library only, as it travels."""
