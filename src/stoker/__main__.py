"""python -m stoker"""

from stoker.cli.main import entry

entry()
