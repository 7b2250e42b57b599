"""Starts processes of its own that run functions of this script, with the standard library and with torch."""

import json
import multiprocessing
import os
import sys


def double(number: int, answers) -> None:
    launched = sorted(name for name in os.environ if name.startswith("STOKER_SHIM"))
    answers.put(
        {
            "by": multiprocessing.current_process().name,
            "number": 2 * number,
            "module": __name__,
            "argv": sys.argv[1:],
            "shim": launched,
        }
    )


def of_torch(index: int, answers) -> None:
    multiprocessing.current_process().name = f"torch-{index}"
    double(10 + index, answers)


def main() -> None:
    import torch.multiprocessing  # here: a child imports this file again, and only one of them needs torch

    # All at the same time.
    spawn, server = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
    answers = spawn.Queue()
    children = [
        spawn.Process(target=double, args=(1, answers), name="spawn"),
        server.Process(target=double, args=(2, answers), name="forkserver"),
    ]
    for child in children:
        child.start()
    torchs = torch.multiprocessing.spawn(of_torch, args=(answers,), nprocs=1, join=False)
    found = [answers.get(timeout=90) for _ in range(3)]
    while not torchs.join():
        pass
    for child in children:
        child.join()
    print(
        "RESULT "
        + json.dumps(
            {"found": sorted(found, key=lambda one: one["by"]), "codes": [child.exitcode for child in children]}
        )
    )


if __name__ == "__main__":
    main()
