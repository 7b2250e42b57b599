"""What runs in a rank's process before the user's script. Standard library and `contract` only."""
