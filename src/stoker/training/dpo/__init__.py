"""Direct Preference Optimisation: a model learns from pairs of answers, without a reward model."""
