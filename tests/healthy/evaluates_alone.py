"""Rank 0 works alone for three times the hang timeout, silently in most ways, while the others wait in a barrier."""

import itertools
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from training import RANK, Tiny, arguments, finish


def score(text: str) -> int:
    letters = sorted(text)
    pairs = [first + second for first, second in itertools.pairwise(letters)]
    return sum(len(pair) for pair in pairs)


def python_loop(end: float) -> int:
    total = 0
    while time.monotonic() < end:
        for length in range(1, 50):
            total += score("some text " * length)
    return total


def numpy_on_one_line(end: float) -> None:
    x = np.random.default_rng(0).random((300, 300))
    while time.monotonic() < end:
        x = np.tanh(x @ x)


def torch_on_one_line(end: float) -> None:
    x = torch.randn(300, 300)
    while time.monotonic() < end:
        x = torch.tanh(x @ x)


def model_calls(end: float) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    with torch.no_grad():
        while time.monotonic() < end:
            model(torch.randn(64, 256))


def reads_files(end: float) -> None:
    """As from a slow disk: a little at a time, almost without CPU."""
    while time.monotonic() < end:
        with open(torch.__file__, "rb") as file:
            while file.read(1 << 14):
                time.sleep(0.1)


def writes_files(end: float) -> None:
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 17))
            time.sleep(1.0)


def generates(end: float) -> None:
    while time.monotonic() < end:
        print("question 1: the answer is 42", flush=True)
        time.sleep(2.0)


def in_processes(end: float) -> None:
    seconds = end - time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.map(works_for, [seconds / 2] * 2, chunksize=1)


def works_for(seconds: float) -> int:
    return python_loop(time.monotonic() + seconds)


def in_a_program(end: float) -> None:
    loop = (
        "import time\nend = time.monotonic() + %f\nwhile time.monotonic() < end:\n    x = [str(n) for n in range(9999)]"
    )
    subprocess.run([sys.executable, "-c", loop % (end - time.monotonic())], check=True)


def in_programs_one_by_one(end: float) -> None:
    """As a compiler's driver: each program is short and does little."""
    while time.monotonic() < end:
        subprocess.run(["sleep", "0.5"], check=True)


def in_threads(end: float) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(python_loop, [end, end]))


KINDS = {
    function.__name__: function
    for function in (python_loop, numpy_on_one_line, torch_on_one_line, model_calls, reads_files, writes_files, generates, in_processes, in_a_program,
                     in_programs_one_by_one, in_threads)
}  # fmt: skip


def main() -> None:
    told = arguments(seconds=30, how="python_loop", steps=40)
    tiny = Tiny()
    tiny.train(told.steps)
    if RANK == 0:
        KINDS[told.how](time.monotonic() + told.seconds)
    dist.barrier()
    tiny.train(told.steps)
    finish()


if __name__ == "__main__":
    main()
