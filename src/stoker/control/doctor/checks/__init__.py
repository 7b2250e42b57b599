"""The checks, one file per family. check.py imports them all."""
