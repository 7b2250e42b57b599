"""The words all rooms share. Standard library only; imports nothing else of Stoker."""
