"""The chain of stages from text to a trained model: its plan, its resume, its report."""
