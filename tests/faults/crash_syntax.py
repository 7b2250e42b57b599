"""Rank 1 imports a module that is not valid Python."""

import importlib
import sys
import tempfile
from pathlib import Path

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "half_edited_model.py").write_text("def forward(x:\n    return x\n")
            sys.path.insert(0, folder)
            fault()
            importlib.import_module("half_edited_model")
