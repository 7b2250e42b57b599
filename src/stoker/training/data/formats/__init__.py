"""Formats of rows, as data is published: one file each, listed in table.py."""
