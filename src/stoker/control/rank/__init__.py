"""Runs in a rank's process before the user's script. Imports the standard library and `contract` only."""
