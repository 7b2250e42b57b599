"""Several programs as one run: each role is a run of its own, started, watched and replaced by its own rules."""
