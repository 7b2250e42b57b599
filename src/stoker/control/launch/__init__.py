"""Request and machine become a plan; the live run carries it out: agents, attempts, when to stop (docs/internals.md)."""
