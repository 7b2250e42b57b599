"""One rank starts two processes with torch.multiprocessing.spawn, and the second raises."""

from moment import fault
from torch import multiprocessing


def work(number: int) -> None:
    if number == 1:
        fault()
        raise ValueError("boom")  # line: spawned


if __name__ == "__main__":
    multiprocessing.spawn(work, nprocs=2)
