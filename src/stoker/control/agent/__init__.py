"""One per host: spawns, relays, stops and sweeps that host's ranks. Standard library only, so that it can travel."""
