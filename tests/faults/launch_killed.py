"""A job with workers and helpers, whose launcher is killed with SIGKILL: at the line READY somebody does that (around.py kill)."""

import subprocess

from moment import HANG_S
from training import train_with_workers


def broken() -> None:
    print("READY", flush=True)


if __name__ == "__main__":
    helper = subprocess.Popen(["setsid", "sleep", str(HANG_S)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    train_with_workers(broken)
