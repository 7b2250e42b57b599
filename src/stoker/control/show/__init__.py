"""The live snapshot of runs, ranks, hosts and GPUs, and four ways to show it: `top`, `web`, `metrics` and plain text."""
