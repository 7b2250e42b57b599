"""slow.*: a rank that is persistently slower than its peers. It is named, with the reason; nothing stops."""

from __future__ import annotations

from stoker.control.verdict.catalogue import entry, steps

_SEEN = (
    "the flight recorder's times of entry: one rank comes last in nine waits of ten, twice in a row, by a fifth of a"
    " step or more; "
)

entry(
    "slow.throttle",
    "A rank is slow because its GPU's clock is held down.",
    seen=_SEEN + "NVML's throttle reasons, which its peers don't have",
    contradicts="the peers' cards are throttled alike",
    fix=("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER on its card; leave it out (--gpus) and tell the provider",),
)
entry(
    "slow.link",
    "A rank is slow because its GPU's link to the host is narrow.",
    seen=_SEEN + "NVML: fewer PCIe lanes than the card has, which its peers have",
    contradicts="the peers' links are as narrow",
    fix=steps("""
    a riser, a slot or a bent pin: reseat the card; `stoker burnin` measures the links; leave it out (--gpus) \
    meanwhile
    """),
)
entry(
    "slow.swap",
    "A rank is slow because it swaps.",
    seen=_SEEN + "major page faults, and memory of it is swapped out",
    contradicts="no page faults that go to the disk",
    fix=("fewer data-loader workers or ranks, or more memory",),
)
entry(
    "slow.cpu",
    "A rank is slow because it waits for a CPU.",
    seen=_SEEN + "its main thread is ready and not running for a quarter of the time and more (schedstat)",
    contradicts="its peers wait for a CPU as much",
    fix=steps("""
    what else runs there (top)? does it have fewer CPUs than its peers (taskset -p)? fewer data-loader workers, \
    OMP_NUM_THREADS lower
    --numa-binding node
    """),
)
entry(
    "slow.data",
    "A rank is slow because it waits for its data loader.",
    seen=_SEEN + "in half of the samples and more its main thread waits in the DataLoader",
    contradicts="its data is ready and it computes",
    fix=("more workers for it, faster storage, or data prepared before; is its shard larger, or on another disk?",),
)
entry(
    "slow.code",
    "A rank is slow because of what it does at one line.",
    seen=_SEEN + "most samples of its main thread are at that line, outside of collectives",
    fix=(
        "look at that line: work that only this rank does (logging, saving, evaluation) makes all wait",
        "unlike cards: equal batches make all as slow as the slowest one",
    ),
)
entry(
    "slow.unknown",
    "A rank is slow for a reason that can't be seen from outside.",
    seen=_SEEN + "no sample shows why",
    contradicts="any of the reasons above",
    fix=("py-spy record -p PID on it",),
)
