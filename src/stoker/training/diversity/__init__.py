"""How unlike each other a model's answers are."""
