"""What the twenty-first review found: folders of logs and checkpoints in which another user puts links."""

from __future__ import annotations
