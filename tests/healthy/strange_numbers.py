"""Speaks of NaN and inf without having any trouble: a help text, a loss scaler's skipped step, one validation loss that overflowed."""

from training import RANK, Tiny, arguments, finish

HELP = """options:
  --on-nan WHAT   what to do when the log says
                  loss: nan
"""

told = arguments(steps=150)
if RANK == 0:
    print(HELP)
tiny = Tiny()
tiny.train(told.steps)
print("validation loss: inf")
print("gradient overflow, skipping step, reducing loss scale to 32768.0")
tiny.train(told.steps)
print("validation loss: 0.4312")
finish()
