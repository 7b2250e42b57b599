"""Notes on torch, kept beside the training script."""

TIPS = ["call model.train() after an evaluation", "zero_grad(set_to_none=True)"]
