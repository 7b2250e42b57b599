"""One file per family of causes. catalogue.py finds them here."""
