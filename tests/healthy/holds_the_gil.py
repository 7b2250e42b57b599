"""Python threads stand still for seconds at a time, in one C call each, on all ranks alike; steps still come."""

import itertools
import time

from training import Tiny, arguments, finish

SAMPLE = 1_000_000

told = arguments(seconds=2.0, every=10, steps=60)


def hold(seconds: float) -> None:
    """Adding numbers up in C never lets go of the GIL; a short sum says how many take that long here."""
    began = time.monotonic()
    sum(itertools.repeat(1, SAMPLE))
    sum(itertools.repeat(1, int(SAMPLE * seconds / (time.monotonic() - began))))


tiny = Tiny()
for step in range(told.steps):
    tiny.step()
    if step % told.every == 0:
        hold(told.seconds)
finish()
