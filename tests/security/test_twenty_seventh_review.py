"""What the twenty-seventh review found: files in a checkout's .git that have no end, an axis that has none,
and long lines that took any amount of memory to break."""

from __future__ import annotations
