"""Imports the file next to it: python scripts/sibling_import.py, from anywhere."""

import json
import os

import neighbour

print("RESULT " + json.dumps({"who": neighbour.WHO, "file": neighbour.__file__, "cwd": os.getcwd()}))
