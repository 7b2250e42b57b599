"""What the twenty-eighth review found."""

from __future__ import annotations


# ---- the meeting point of several machines, taken by another user before the launcher that would be number 0 ----
