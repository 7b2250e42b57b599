"""/dev/shm (1 MB of it) is too small for a cache that rank 1's data-loader worker fills there: the worker dies of a bus error."""

from multiprocessing.shared_memory import SharedMemory

from moment import fault
from training import train_with_workers


def broken() -> None:
    cache = SharedMemory(create=True, size=64_000_000)
    fault()
    assert cache.buf is not None
    cache.buf[:] = bytes(64_000_000)


if __name__ == "__main__":
    train_with_workers(broken)
