"""Step times are lognormal and each rank draws its own: now this one is late, now that one, and now and then a step takes very long."""

import random

from training import RANK, Tiny, arguments, finish

told = arguments(median=0.05, longest=12.0, sigma=1, steps=200)
tiny = Tiny()
draw = random.Random(told.seed * 1000 + RANK)
for _ in range(told.steps):
    tiny.step(min(told.longest, told.median * draw.lognormvariate(0, told.sigma)))
finish()
