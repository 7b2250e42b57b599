"""One dense decoder: its block, the families that describe it, its loss, its kernels."""
