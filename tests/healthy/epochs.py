"""Epochs with a pause between them: shuffling, a new shard, on all ranks."""

from training import Tiny, arguments, finish, spend

told = arguments(seconds=15.0, how="sleep", epochs=3, steps=80)
tiny = Tiny()
for epoch in range(told.epochs):
    if epoch:
        spend(told.seconds, told.how)
    tiny.train(told.steps)
    print(f"epoch {epoch} done")
finish()
