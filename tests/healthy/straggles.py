"""One rank is slower than its peers throughout: to be named, perhaps, but never stopped."""

from training import RANK, WORLD, Tiny, arguments, finish

told = arguments(extra=0.2, steps=120)
tiny = Tiny()
for _ in range(told.steps):
    tiny.step(0.05 + (told.extra if told.seed % WORLD == RANK else 0.0))
finish()
