"""What the thirty-second review found."""

from __future__ import annotations
