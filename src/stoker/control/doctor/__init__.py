"""`stoker doctor` and `stoker clean`: checks that turn an examination into findings. Only cleanup.py changes anything."""
