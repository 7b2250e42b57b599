"""`python -m stoker` runs the `stoker` program."""

from stoker.cli.main import entry

entry()
