"""A data-loader worker of rank 1 hangs; the rank waits for its batch, the others wait for the rank."""

import time

from moment import HANG_S, fault
from training import train_with_workers


def broken() -> None:
    fault()
    time.sleep(HANG_S)


if __name__ == "__main__":
    train_with_workers(broken)
