"""Lies next to sibling_import.py and is found there, whatever the working directory is."""

WHO = "the neighbour in the script's own folder"
