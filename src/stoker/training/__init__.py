"""The training plane: torch lives here, and only here."""
