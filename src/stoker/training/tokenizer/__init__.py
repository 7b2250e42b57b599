"""Text to tokens and back, bytes-exact."""
