"""A shard of the data set is not there on rank 1."""

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        with open("/data/shards/train-00020.bin", "rb") as file:
            file.read()
