"""What a training job takes of a GPU, and settings that fit it: from shapes alone. No torch."""
