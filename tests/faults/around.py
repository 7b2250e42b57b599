"""What has to surround a launch so that a fault can happen in it: a small disk, a small cgroup, somebody else on the card, a killer.

    python around.py mount 1m /dev/shm stoker run ...      a tmpfs of 1 MB there, for this command only (root)
    python around.py cgroup 900m stoker run ...            a memory cgroup with that limit (root)
    python around.py hold 0.8 stoker run ...               at the line READY another process takes 80 % of the first GPU
    python around.py kill stoker run ...                   at the line READY the command itself gets SIGKILL

Ends with the command's exit code, 128+n for a signal. Standard library only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def cannot(needs: str) -> str:
    """Why a case that needs this can't be made here; empty if it can."""
    if needs == "gpu":
        return "" if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else "no NVIDIA GPU here"
    if needs == "root":
        private = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        done = subprocess.run(private, capture_output=True, text=True, check=False) if shutil.which("unshare") else None
        return (
            ""
            if done and done.returncode == 0
            else f"no tmpfs can be mounted here: {done.stderr.strip() if done else 'no unshare'}"
        )
    if needs == "cgroup":
        try:
            _cgroup("try").rmdir()
        except OSError as problem:
            return f"no memory cgroup can be made here: {problem}"
        return ""
    if needs in ("safetensors", "transformers", "lightning", "accelerate"):
        return "" if importlib.util.find_spec(needs) else f"{needs} is not installed"
    assert not needs, needs
    return ""


def mount(size: str, folder: str, command: list[str]) -> int:
    inside = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", inside, "sh", size, folder, *command])


def cgroup(limit: str, command: list[str]) -> int:
    folder = _cgroup(str(os.getpid()))
    try:
        room = folder / ("memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes")
        room.write_text(str(int(limit[:-1]) * _UNITS[limit[-1].lower()]))
        enter = f'echo $$ > "{folder}/cgroup.procs" && exec "$@"'
        return _code(subprocess.run(["sh", "-c", enter, "sh", *command], check=False).returncode)
    finally:
        _removed(folder)


def _cgroup(name: str) -> Path:
    """A fresh memory cgroup below our own: version 1, else version 2."""
    mine = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    parent = (
        Path("/sys/fs/cgroup/memory" + mine["memory"])
        if "memory" in mine
        else Path("/sys/fs/cgroup" + mine.get("", "/"))
    )
    folder = parent / f"faults-{name}"
    folder.mkdir()
    if not any((folder / room).exists() for room in ("memory.max", "memory.limit_in_bytes")):
        folder.rmdir()
        raise OSError(f"{parent} hands no memory limit down")
    return folder


def _removed(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            return folder.rmdir()
        except OSError:  # busy while the last process in it ends
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def hold(share: str, command: list[str]) -> int:
    """The holder starts before the command does, so that it is nobody's child in the job, and takes the memory when the job is ready."""
    with tempfile.TemporaryDirectory() as folder:
        go = Path(folder, "go")
        holder = subprocess.Popen([sys.executable, __file__, "holder", share, str(go)])
        try:
            return _until_ready(command, lambda _: go.touch())
        finally:
            holder.kill()
            holder.wait()


def holder(share: str, go: str) -> int:
    while not os.path.exists(go):
        time.sleep(0.02)
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory, free, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
    for code in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(int(float(share) * total.value))),
    ):
        assert code == 0, f"CUDA error {code}"
    signal.pause()
    return 0


def kill(command: list[str]) -> int:
    def end(process: subprocess.Popen[bytes]) -> None:
        folder = os.environ.get("FAULTS_DIR")
        if folder:
            Path(folder, "fault-0-launcher").write_text(f"{time.time():.6f}")
        process.kill()

    return _until_ready(command, end, go_on=False)


def _until_ready(command: list[str], then: Callable[[subprocess.Popen[bytes]], None], go_on: bool = True) -> int:
    """Runs the command, passes its output on, and calls `then` at the first line that holds READY. Reads on after that, or not: what outlives a
    killed launcher keeps the pipe open."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    waiting = True
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if waiting and b"READY" in line:
            waiting = False
            then(process)
            if not go_on:
                break
    return _code(process.wait())


def _code(status: int) -> int:
    return 128 - status if status < 0 else status


def main() -> int:
    what, *words = sys.argv[1:]
    if what == "mount":
        return mount(words[0], words[1], words[2:])
    if what == "cgroup":
        return cgroup(words[0], words[1:])
    if what == "hold":
        return hold(words[0], words[1:])
    if what == "holder":
        return holder(words[0], words[1])
    if what == "kill":
        return kill(words)
    print(__doc__, file=sys.stderr)
    return 64


if __name__ == "__main__":
    sys.exit(main())
