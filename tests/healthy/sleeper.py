"""Never steps and sleeps nearly all the time: waits for work that comes rarely."""

import time

from training import RANK, arguments

told = arguments(seconds=12.0, times=3)
for turn in range(told.times):
    time.sleep(told.seconds)
    print(f"rank {RANK}: nothing to do, turn {turn}")
