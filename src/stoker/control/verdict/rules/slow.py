"""slow.*: a rank that is persistently slower than its peers. It is named, with the reason; nothing stops."""

from __future__ import annotations

from stoker.control.verdict.catalogue import Family

_SEEN = (
    "the flight recorder's times of entry: one rank comes last in nine waits of ten, twice in a row, by a fifth of a"
    " step or more; "
)

_HOST = (
    "the live view only: a rank that the others wait for, on another host than theirs; its host's gauges, which the other"
    " hosts' don't show: "
)

family = Family(__name__, SEEN=_SEEN, HOST=_HOST, PRESSED="40 %", FULL="80 %")
family.entries("""
slow.throttle: A rank is slow because its GPU's clock is held down.
  seen: {SEEN}NVML's throttle reasons, which its peers don't have
  unless: the peers' cards are throttled alike
  fix: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER on its card; leave it out (--gpus) and tell the provider
slow.link: A rank is slow because its GPU's link to the host is narrow.
  seen: {SEEN}NVML: fewer PCIe lanes than the card has, which its peers have
  unless: the peers' links are as narrow
  fix: a riser, a slot or a bent pin: reseat the card; `stoker burnin` measures the links; leave it out (--gpus)
      meanwhile
slow.swap: A rank is slow because it swaps.
  seen: {SEEN}major page faults, and memory of it is swapped out
  unless: no page faults that go to the disk
  fix: fewer data-loader workers or ranks, or more memory
slow.cpu: A rank is slow because it waits for a CPU.
  seen: {SEEN}its main thread is ready and not running for a quarter of the time and more (schedstat)
  unless: its peers wait for a CPU as much
  fix: what else runs there (top)? does it have fewer CPUs than its peers (taskset -p)? fewer data-loader workers,
      OMP_NUM_THREADS lower
  fix: --numa-binding node
slow.data: A rank is slow because it waits for its data loader.
  seen: {SEEN}in half of the samples and more its main thread waits in the DataLoader
  unless: its data is ready and it computes
  fix: more workers for it, faster storage, or data prepared before; is its shard larger, or on another disk?
slow.memory: A rank is slow because its host is short of memory.
  seen: {HOST}processes wait for memory (/proc/pressure) for {PRESSED} of the time or more
  unless: the other hosts wait as much, or the ranks are all on this host
  fix: what uses its memory (`stoker top`)? fewer data-loader workers or ranks there, or leave the host out
slow.disk: A rank is slow because its host waits for its disk.
  seen: {HOST}processes wait for the disk (/proc/pressure) for {PRESSED} of the time or more
  unless: the other hosts wait as much, or the ranks are all on this host
  fix: copy the data to that host's own disk first (`--stage`); save checkpoints less often; what else reads or writes
      there (iotop)?
slow.network: A rank is slow because its host's network link is full.
  seen: {HOST}it sends or receives {FULL} of what its link carries, or more
  unless: the other hosts' links are as full
  fix: what else sends there (iftop)? data from a network disk goes to a local one first (`--stage`)
  fix: fewer bytes: gradient accumulation, or local SGD (`stoker docs balance`)
slow.code: A rank is slow because of what it does at one line.
  seen: {SEEN}most samples of its main thread are at that line, outside of collectives
  fix: look at that line: work that only this rank does (logging, saving, evaluation) makes all wait
  fix: different cards with equal batches are all as slow as the slowest one: `stoker docs balance`
slow.unknown: A rank is slow for a reason that can't be seen from outside.
  seen: {SEEN}no sample shows why
  unless: any of the reasons above
  fix: py-spy record -p PID on it
""")
