"""What a run will do, worked out before anything starts: options, hosts, GPUs, ranks, the run directory."""
