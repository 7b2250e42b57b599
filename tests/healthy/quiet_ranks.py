"""Only the first ranks log anything: all, some or none of them."""

from training import RANK, Tiny, arguments, finish

told = arguments(speaks=1, steps=300)
tiny = Tiny()
for _ in range(told.steps):
    tiny.step(speaks=told.speaks > RANK)
finish()
