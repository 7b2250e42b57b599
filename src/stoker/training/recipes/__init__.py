"""One readable script per stage, started as the ranks of a run."""
