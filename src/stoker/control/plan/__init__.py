"""Works out what a run will do before anything starts: options, hosts, GPUs, ranks, the run directory."""
