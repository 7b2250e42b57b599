"""Scripts with one fault each, and what is to be said of them. A package: benchmarks/faults.py would take the name."""
