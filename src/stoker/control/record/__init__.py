"""Reads and writes run directories, lists them and finds one of them."""
