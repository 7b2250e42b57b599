"""Holds one module per family of causes. catalogue.py imports every module in this package."""
