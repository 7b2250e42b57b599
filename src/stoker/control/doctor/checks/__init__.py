"""One file per family of checks. check.py finds them here."""
