"""A model that scores answers, learned from pairs."""
