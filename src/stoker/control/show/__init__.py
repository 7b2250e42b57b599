"""One live snapshot of runs, ranks, hosts and GPUs, and its drawing in text. Viewers only draw it."""
