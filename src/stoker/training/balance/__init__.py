"""Unlike ranks pull their weight: who computes how many samples of a step, and how gradients travel."""
