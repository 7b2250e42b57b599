"""From one step to the next all steps take five times as long: longer sequences, or another job on the machine."""

from training import Tiny, arguments, finish

told = arguments(step=1.0, fast=20, slow=8)
tiny = Tiny()
for _ in range(told.fast):
    tiny.step(told.step)
for _ in range(told.slow):
    tiny.step(5 * told.step)
finish()
