"""The script has an excepthook and a stdout of its own, and rank 1 raises."""

import io
import sys

from moment import fault, guilty
from training import steps

sys.excepthook = lambda kind, error, trace: None
for step in steps():
    if guilty(step):
        fault()
        sys.stdout = io.StringIO()
        raise ValueError("boom that nobody prints")
