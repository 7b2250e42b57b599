"""Shared by the training plane and the control plane. Uses only the standard library and imports nothing else of Stoker."""
