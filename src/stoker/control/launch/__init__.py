"""Request and machine become a plan; the coordinator carries it out: attempts, members, when to stop."""
