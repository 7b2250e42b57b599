"""The first step compiles, or reads a cache over the network, on all ranks or on rank 0 alone."""

from training import RANK, Tiny, arguments, finish, spend

told = arguments(seconds=25.0, how="busy", who="all", steps=60)
tiny = Tiny()
if told.who == "all" or RANK == 0:
    spend(told.seconds, told.how)
tiny.train(told.steps)
finish()
