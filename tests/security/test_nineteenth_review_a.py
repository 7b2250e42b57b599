"""What the nineteenth review found: the history of another user's run played back, and bodies and answers of `stoker serve`."""

from __future__ import annotations
