"""Ranks as torchrun would start them, forked from one process that has torch already: a start costs tenths of a second."""

from __future__ import annotations

_SERVER = """
for line in sys.stdin:
    job = json.loads(line)
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.chdir(job["folder"])
                log = os.open(f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
                code = work(job, rank)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


def program(before: str) -> str:
    """For `python -c`. A job is a line of JSON with at least ranks, folder and port; back come the ranks' pids, then their exit codes.

    `before` imports what ranks share and defines work(job, rank), which returns a rank's exit code.
    """
    return "import json, os, sys, traceback\n" + before + _SERVER
