"""Evidence becomes one cause, the guilty rank, and what to do. One file per family of causes."""
