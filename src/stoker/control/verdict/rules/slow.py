"""Causes slow.*: a rank is persistently slower than its peers. Stoker reports it with the reason and doesn't stop the job."""

from __future__ import annotations

from stoker.control.verdict.catalogue import Family

_SEEN = (
    "the flight recorder's entry times: one rank comes last in nine of ten waits, in two checks in a row, by a fifth of a"
    " step or more; "
)

_HOST = (
    "in the live view only: the others wait for a rank on another host, and that host's gauges, unlike those of the"
    " other hosts, show: "
)

family = Family(__name__, SEEN=_SEEN, HOST=_HOST, PRESSED="40 %", FULL="80 %")
family.entries("""
slow.throttle: A rank is slow because its GPU's clock is held down.
  seen: {SEEN}NVML's throttle reasons, which its peers don't have
  unless: the peers' GPUs are throttled as much
  fix: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER for its GPU; exclude it (--gpus) and tell the provider
slow.link: A rank is slow because its GPU's link to the host is narrow.
  seen: {SEEN}NVML: fewer PCIe lanes than the GPU supports, which its peers use
  unless: the peers' links are as narrow
  fix: a riser, a slot or a bent pin: reseat the GPU; `stoker burnin` measures the links; exclude it (--gpus)
      meanwhile
slow.swap: A rank is slow because it is swapping.
  seen: {SEEN}major page faults, and memory of the rank is swapped out
  unless: no page faults that read from disk
  fix: fewer data-loader workers or ranks, or more memory
slow.cpu: A rank is slow because it waits for a CPU.
  seen: {SEEN}its main thread is ready but not running for a quarter of the time or more (schedstat)
  unless: its peers wait for a CPU as much
  fix: check what else runs on its host (top), and whether it has fewer CPUs than its peers (taskset -p); fewer data-loader workers,
      a lower OMP_NUM_THREADS
  fix: --numa-binding node
slow.data: A rank is slow because it waits for its data loader.
  seen: {SEEN}in at least half of the samples its main thread waits in the DataLoader
  unless: its data is ready and it computes
  fix: more workers for it, faster storage, or data prepared in advance; is its shard larger, or on another disk?
slow.memory: A rank is slow because its host is short of memory.
  seen: {HOST}processes wait for memory (/proc/pressure) for {PRESSED} of the time or more
  unless: the other hosts wait as much, or the ranks are all on this host
  fix: check what uses its memory (`stoker top`); fewer data-loader workers or ranks there, or exclude the host
slow.disk: A rank is slow because its host waits for its disk.
  seen: {HOST}processes wait for the disk (/proc/pressure) for {PRESSED} of the time or more
  unless: the other hosts wait as much, or the ranks are all on this host
  fix: copy the data to that host's own disk first (`--stage`); save checkpoints less often; check what else reads or
      writes there (iotop)
slow.network: A rank is slow because its host's network link is full.
  seen: {HOST}it sends or receives {FULL} or more of what its link can carry
  unless: the other hosts' links are as full
  fix: check what else sends there (iftop); copy data from a network disk to a local one first (`--stage`)
  fix: send fewer bytes: gradient accumulation, or local SGD (`stoker docs balance`)
slow.code: A rank is slow because of what it does at one line.
  seen: {SEEN}most samples of its main thread are at that line, outside of collectives
  fix: look at that line: the others wait for work that only this rank does (logging, saving, evaluation)
  fix: with equal batches, different GPUs are all as slow as the slowest one: `stoker docs balance`
slow.unknown: A rank is slow for an unknown reason.
  seen: {SEEN}no sample shows the reason
  unless: any of the reasons above
  fix: py-spy record -p PID, with its pid
""")
