"""gpu.*: errors of a card and of its driver."""

from __future__ import annotations
