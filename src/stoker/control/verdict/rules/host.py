"""Causes host.*: a limit of a host was reached, or its agent or its copy of the files failed."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import find_in_output, line_of, traceback_evidence

ORDER = 60

family = Family(__name__)


@family.cause("""
host.processes: The host allows no more processes or threads.
  perhaps: can't start new thread|pthread_create failed|Thread creation failed: Resource temporarily unavailable|
      fork: Resource temporarily
  seen: "can't start new thread", pthread_create or libgomp that fail, or errno 11 from fork; before the start: more
      ranks than processes allowed
  unless: errno 11 of a file or a socket that would block: rank.exception
  fix: ulimit -u, and cat /sys/fs/cgroup/pids.max: a container's limit includes threads (docker run --pids-limit=-1)
  fix: fewer threads: OMP_NUM_THREADS (Stoker sets cores ÷ ranks unless it is set), fewer data-loader workers
""")
def match_process_limit(case: Case, match: Match | None) -> CauseMatch | None:
    error = case.end.error
    if (
        not match
        and error is not None
        and "[Errno 11]" in error.message
        and re.search(r"in _execute_child|popen_fork|os\.fork\(", error.traceback)
    ):
        match = find_in_output(case, r"\[Errno 11\][^\n]*")
    if not match:
        return None
    summary = f"{case.rank_name}: no more processes or threads are allowed ({line_of(match)})"
    return CauseMatch(summary, (line_of(match), *traceback_evidence(case.end, 4)))


family.entries("""
host.files: The limit of open files is too low for the number of ranks.
  seen: before the start: ulimit -n is less than 4 per rank plus 64
  unless: a rank reached the limit while it ran: data.too-many-files
  fix: ulimit -n 65536   # in the shell that starts stoker
host.agent: A host's agent did not start.
  seen: before the start: it ended, or did not respond in time
  unless: it was connected and was lost later: host.agent-lost
  fix: ssh HOST true   # must work within seconds, without a password or a question
  fix: a faulty driver can block it: run nvidia-smi on that host
host.copy: The working directory or staged data could not be copied to a host.
  seen: before the start: --sync or --stage failed; the message names the host and the reason
  fix: check free space and permissions on that host: df -h, ls -ld on the folder
  fix: without --sync, use a shared folder, or the same files on all hosts
""")
