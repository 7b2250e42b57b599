"""How crowded a prompt's neighbourhood is, and what weight it gets."""
