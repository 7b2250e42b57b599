"""Checks: one function each, with a stable id; an examination in, findings out. `clean` is the only file that acts."""
