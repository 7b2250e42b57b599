"""Started with python -m. seen.py is put here by whoever copies this folder."""
