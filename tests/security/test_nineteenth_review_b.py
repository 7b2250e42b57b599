"""What the nineteenth review found: secrets below their names, a server's impossible numbers, frames behind the report of a NaN."""

from __future__ import annotations
