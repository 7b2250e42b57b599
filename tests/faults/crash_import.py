"""A package is missing on rank 1 only; the others already wait for it in the store."""

import importlib

from moment import RANK, fault
from training import steps

if RANK == 1:
    fault()
    importlib.import_module("a_package_that_is_not_installed")
for _ in steps():
    pass
