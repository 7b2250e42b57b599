"""What both planes share. Uses only the standard library and imports nothing else of Stoker."""
