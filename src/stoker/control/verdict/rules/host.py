"""host.*: what the host allows, and the agents on it."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, Family, Found, Match
from stoker.control.verdict.lastwords import find, line_of, traced

ORDER = 60

family = Family(__name__)


@family.cause("""
host.processes: The host allows no more processes or threads.
  perhaps: can't start new thread|pthread_create failed|Thread creation failed: Resource temporarily unavailable|
      fork: Resource temporarily
  seen: "can't start new thread", pthread_create or libgomp that fail, or errno 11 from fork; before the start: more
      ranks than processes allowed
  unless: errno 11 of a file or a socket that would block: rank.exception
  fix: ulimit -u, and cat /sys/fs/cgroup/pids.max: a container's limit counts threads too (docker run --pids-limit=-1)
  fix: fewer threads: OMP_NUM_THREADS (Stoker sets cores ÷ ranks unless it is set), fewer data-loader workers
""")
def processes(case: Case, found: Match | None) -> Found | None:
    error = case.end.error
    if (
        not found
        and error is not None
        and "[Errno 11]" in error.message
        and re.search(r"in _execute_child|popen_fork|os\.fork\(", error.traceback)
    ):
        found = find(case, r"\[Errno 11\][^\n]*")
    if not found:
        return None
    summary = f"{case.who}: no more processes or threads are allowed ({line_of(found)})"
    return Found(summary, (line_of(found), *traced(case.end, 4)))


family.entries("""
host.files: The limit of open files is too low for the number of ranks.
  seen: before the start: ulimit -n below 4 per rank and 64 more
  unless: a rank ran into the limit by itself: data.too-many-files
  fix: ulimit -n 65536   # in the shell that starts stoker
host.agent: A host's agent did not come up.
  seen: before the start: it ended, or said nothing in time
  unless: it was there and vanished later: host.agent-lost
  fix: ssh HOST true   # no password, no question, in seconds?
  fix: a sick driver can hang it: nvidia-smi on that host
host.copy: The working directory or staged data could not be copied to a host.
  seen: before the start: --sync or --stage failed there; the line says which host and why
  fix: room and permissions there: df -h, and who owns the folder
  fix: without --sync a shared folder, or the same files on all hosts, will do
""")
