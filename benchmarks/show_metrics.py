"""What `stoker metrics` costs: CPU time of the exporter while it collects and is scraped once a second.

    python benchmarks/show_metrics.py [--seconds 60] [--machine tests/machines/box8-healthy.json]

The recorded machine has 8 GPUs; a run of 8 ranks is under way beside it. NVML's own time is not in it: there is none here.
Then what --metrics-port costs the launcher: modules, resident memory and CPU time with and without it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = """import stoker, time
begin = time.monotonic()
step = 0
while time.monotonic() - begin < {seconds}:
    stoker.beat(step=step, loss=1.0)
    step += 1
    time.sleep(0.1)
"""


def cpu(pid: int) -> float:
    """Seconds, with children that have ended."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(word) for word in words[11:15]) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


def scrape(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    size = len(connection.getresponse().read())
    connection.close()
    return size


def exporter(env: dict[str, str], folder: str, seconds: float) -> None:
    argv = [sys.executable, "-m", "stoker"]
    Path(folder, "train.py").write_text(RUN.format(seconds=seconds + 20))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([*argv, "run", "--nproc-per-node", "8", "train.py"], env=env, cwd=folder, **quiet)
    served = subprocess.Popen(
        [*argv, "metrics", "--port", "0", "--interval", "1s"], env=env, cwd=folder, stderr=subprocess.PIPE
    )
    try:
        assert served.stderr is not None
        port = int(served.stderr.readline().decode().rpartition(":")[2].partition("/")[0])
        time.sleep(8)  # imports, the doctor's first look, and the ranks' start
        before, began = cpu(served.pid), time.monotonic()
        sizes = []
        while time.monotonic() - began < seconds:
            sizes.append(scrape(port))
            time.sleep(max(0.0, began + len(sizes) - time.monotonic()))
        took = time.monotonic() - began
        share = (cpu(served.pid) - before) / took
        print(
            f"exporter: {len(sizes)} scrapes in {took:.0f} s, {sizes[-1] / 1e3:.0f} kB each; {share:.2%} of a core,"
            f" {resident(served.pid) / 1e3:.0f} MB"
        )
    finally:
        served.terminate()
        served.wait()
        run.send_signal(signal.SIGTERM)
        run.wait()


def launcher(env: dict[str, str], folder: str) -> None:
    Path(folder, "short.py").write_text("import time; time.sleep(3)")
    for words in ([], ["--metrics-port", "0"]) * 2:
        argv = [sys.executable, "-m", "stoker", "run", "--nproc-per-node", "1", *words, "short.py"]
        run = subprocess.Popen(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(2)
        told = f"{cpu(run.pid):.2f} s of CPU time, {resident(run.pid) / 1e3:.1f} MB"
        run.wait()
        print(f"launcher after 2 s {' '.join(words) or 'without --metrics-port':<24} {told}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--machine", default=str(ROOT / "tests/machines/box8-healthy.json"))
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Under this machine's name: else its GPUs are exported twice, as recorded and as the run's.
        data = json.loads(Path(told.machine).read_text())
        data["machine"]["hostname"] = os.uname().nodename
        machine = Path(folder, "machine.json")
        machine.write_text(json.dumps(data))
        env = {**os.environ, "STOKER_MACHINE": str(machine), "STOKER_GPU_LOCKS": os.path.join(folder, "locks")}
        launcher(env, folder)
        exporter(env, folder, told.seconds)


if __name__ == "__main__":
    main()
