"""A data-loader worker of rank 1 raises; torch raises it again in the rank."""

from moment import fault
from training import train_with_workers


def broken() -> None:
    fault()
    raise ValueError("a sample of rank 1 can't be decoded")


if __name__ == "__main__":
    train_with_workers(broken)
