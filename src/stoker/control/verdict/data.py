"""data.*: what the script reads and writes."""

from __future__ import annotations
