"""A rank that imports nothing heavy and says at once that it is there, and with how many threads it was told to work."""

import os
import time

print(f"HELLO {time.monotonic()} {os.environ.get('OMP_NUM_THREADS', '')}", flush=True)
