"""A data-loader worker of rank 1 is stopped by SIGSTOP."""

import os
import signal

from moment import fault
from training import train_with_workers


def broken() -> None:
    fault()
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    train_with_workers(broken)
