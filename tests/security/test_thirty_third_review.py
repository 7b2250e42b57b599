"""What the thirty-third review found in the control plane."""

from __future__ import annotations
