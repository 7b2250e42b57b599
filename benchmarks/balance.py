"""What balance gains where one rank is slow, and what each way to exchange gradients costs and gives: 2 CPU ranks, one thread each.

    python benchmarks/balance.py --repeats 3                 # unlike ranks: recipes and drop-in
    python benchmarks/balance.py --only comm                 # gradients over a slow link (two network namespaces; needs root)

A rank stands for a card: besides the little its process computes, each backward is idle for 15 ms a sample, the slow rank's for two or three times as
long, before its last gradient. (`--slow work`: no idling; the slow rank does its forward and backward two or three times. That is a slow card only where
each rank has a core of its own: where cores have other work, the ranks take them from each other.) A plan
is made as in any run; from step 60 on, equal shares (without any of balance's measuring) and the plan take turns, ten steps each, in the same processes: what
else the machine does hits both. A pair is two blocks side by side, less two steps where they meet; the ratio is the median over the pairs of all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RATIOS = {1: 0.98, 2: 1.35, 3: 1.80}  # slow rank's work : bar
# from this step on plans have been made: a second one where the first, by seconds that hold a fixed part, was half way
COUNTED = 60
BLOCK = 10  # steps of one kind
WARM = 30  # steps that the exchange is not timed: PowerSGD begins after 20
CARD_S = 0.015  # of a fast card, for a sample
COMMS = ("full", "bf16", "powersgd", "local:8")


def slow_down(model: Any, first: Any, times: int) -> None:
    """`first`: the layer whose gradient comes last."""
    import torch

    if not os.environ.get("SLOW"):
        return
    if os.environ["SLOW"] == "work":
        forward = model.forward

        def again(*args: torch.Tensor) -> torch.Tensor:
            for _ in range(times - 1 if torch.is_grad_enabled() else 0):
                torch.autograd.grad(forward(*args).sum(), list(model.parameters()))
            return forward(*args)

        model.forward = again
        return

    def watch(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: time.sleep(CARD_S * times * len(gradient)))

    first.register_forward_hook(watch)


def take_turns() -> None:
    """From step 60 on, ten steps with equal shares and nothing of balance, ten with the plan that was made."""
    from stoker.training.balance.plan import Plan, Plans, equal
    from stoker.training.loop.step import Pending, Stepper

    planned, step = Plans._at, Stepper.step

    def at(self: Plans, number: int) -> Plan:
        found = planned(self, number)
        return Plan(found.step, equal(self.batch, self.ranks)) if without(number) else found

    def timed(self: Stepper, batch: Any, *args: Any, **more: Any) -> Pending:
        kept = self._clock
        if without(batch.step):
            self._clock = None
        try:
            return step(self, batch, *args, **more)
        finally:
            self._clock = kept

    Plans._at, Stepper.step = at, timed  # type: ignore[method-assign]


def without(step: int) -> bool:
    return step >= COUNTED and (step - COUNTED) // BLOCK % 2 == 0


def recipe(times: int, words: list[str]) -> None:
    """A rank of a pretraining whose model does its work `times` times."""
    from stoker.training.model.decoder import Decoder
    from stoker.training.recipes import pretrain, stage

    if "--comm" not in words:
        take_turns()
    make = Decoder.__init__

    def made(self: Decoder, *args: Any) -> None:
        make(self, *args)
        slow_down(self, self.embed, times)

    Decoder.__init__ = made  # type: ignore[method-assign]
    sys.exit(stage.run(pretrain.main, words))


def dropin(times: int, words: list[str]) -> None:
    """A rank of a plain DDP loop with the drop-in."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from stoker import balance

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    slow_down(net, net[0], times)
    take_turns()
    data = TensorDataset(torch.randn(24 * 24, 512))
    loader = DataLoader(data, batch_sampler=balance.Sampler(data, batch=24))
    model = balance.attach(DistributedDataParallel(net), loader)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    ends: list[float] = []
    while len(ends) < int(words[0]):
        for (inputs,) in loader:
            began = time.perf_counter()  # without the loader, which takes one sample at a time
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        Path("steps.json").write_text(json.dumps(ends))
    dist.barrier()
    dist.destroy_process_group()


def text(folder: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    path = folder / "text.txt"
    path.write_text("\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(5000)))
    return path


Inside = tuple[list[str], list[str]]


def launch(
    kind: str,
    folder: Path,
    times: tuple[int, int],
    words: list[str],
    inside: Inside = ([], []),
    address: str = "127.0.0.1",
) -> None:
    """Two ranks; `inside`: the words before each rank's command, `ip netns exec NAME` say."""
    folder.mkdir(parents=True)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    base = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if inside[0]:
        base["GLOO_SOCKET_IFNAME"] = "cable"
    processes = []
    for rank in range(2):
        command = [*inside[rank], sys.executable, os.path.abspath(__file__), "--rank", kind, str(times[rank]), *words]
        log = open(folder / f"rank-{rank}.log", "wb")  # noqa: SIM115  the rank's own from here on
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
        )
    if [process.wait() for process in processes] != [0, 0]:
        sys.exit((folder / "rank-0.log").read_text() + (folder / "rank-1.log").read_text())


def metrics(folder: Path) -> list[dict[str, float]]:
    path = next((folder / "runs").glob("torchrun-*")) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def common(data: Path) -> list[str]:
    return [
        "--data",
        str(data),
        "--cache",
        str(data.parent / "cache"),
        "--tokenizer.path",
        "bytes",
        "--preset",
        "small",
        "--model.depth",
        "2",
        "--log_every",
        "1",
        "--export",
        "false",
        "--at_end",
        "false",
        "--checkpoint.every",
        "0",
        "--eval_every",
        "0",
    ]


def recipe_steps(folder: Path, data: Path, times: int, steps: int) -> tuple[dict[int, float], str]:
    words = [
        *common(data),
        "--context_length",
        "16",
        "--batch.tokens",
        "384",
        "--batch.micro",
        "24",
        "--data.validation",
        "0",
        "--max-steps",
        str(steps),
    ]
    launch("recipe", folder, (1, times), [*words, "--balance", "auto"])
    lines = metrics(folder)
    when = {int(line["step"]): line["time"] for line in lines if "loss" in line}
    plans = [line["shares"] for line in lines if "shares" in line]
    return {step: when[step] - when[step - 1] for step in when if step > 0}, "→".join(
        "+".join(map(str, one)) for one in plans
    )


def dropin_steps(folder: Path, data: Path, times: int, steps: int) -> tuple[dict[int, float], str]:
    launch("dropin", folder, (1, times), [str(steps)])
    said = [line for line in (folder / "rank-0.log").read_text().splitlines() if "ranks take" in line]
    plans = [line.split("take ")[1].split(" of")[0].replace(", ", "+") for line in said]
    return dict(enumerate(json.loads((folder / "steps.json").read_text()))), "→".join(plans)


def pairs_of(seconds: dict[int, float], steps: int) -> list[tuple[float, float]]:
    """Steps/s (equal, balanced) of blocks side by side."""
    found = []
    for begin in range(COUNTED, steps - 2 * BLOCK + 1, 2 * BLOCK):
        equal, planned = (
            1 / statistics.median(seconds[step] for step in range(first + 2, first + BLOCK))
            for first in (begin, begin + BLOCK)
        )
        found.append((equal, planned))
    return found


def unlike(kinds: list[str], repeats: int, steps: int, folder: Path) -> None:
    data = text(folder)
    print(
        "| | slow rank (plans) | equal shares, steps/s | balance, steps/s | × (median of pairs) | quartiles | pairs |"
        " bar | |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        measure = {"recipe": recipe_steps, "dropin": dropin_steps}[kind]
        for times, bar in RATIOS.items():
            pairs, plans = [], set()
            for repeat in range(repeats):
                seconds, plan = measure(folder / f"{kind}-{times}-{repeat}", data, times, steps)
                pairs += pairs_of(seconds, steps)
                plans.add(plan or "none")
            low, ratio, high = statistics.quantiles((planned / equal for equal, planned in pairs), n=4)
            equal, planned = (statistics.median(one) for one in zip(*pairs, strict=True))
            print(
                f"| {kind} | {times}:1 ({'; '.join(sorted(plans))}) | {equal:.2f} | {planned:.2f} | {ratio:.2f} |"
                f" {low:.2f} – {high:.2f} | {len(pairs)} | ≥ {bar} | {'✓' if ratio >= bar else '✗ missed'} |",
                flush=True,
            )


class Link:
    """Two network namespaces and a cable of so many Mbit/s."""

    def __init__(self, mbit: int) -> None:
        self.names = [f"stk{os.getpid()}{side}" for side in "ab"]
        cable = [f"stk{os.getpid() % 10**6}{side}" for side in "ab"]
        for name in self.names:
            self._ip("netns", "add", name)
        try:
            self._connect(cable, mbit)
        except BaseException:
            self.close()
            raise

    def _connect(self, cable: list[str], mbit: int) -> None:
        self._ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip(self.names, cable, strict=True), 1):
            self._ip("link", "set", end, "netns", name, "name", "cable")
            for words in (
                ("addr", "add", f"10.77.0.{number}/24", "dev", "cable"),
                ("link", "set", "dev", "cable", "up"),
                ("link", "set", "dev", "lo", "up"),
            ):
                self._ip("-n", name, *words)
            subprocess.run(
                [
                    "tc",
                    "-n",
                    name,
                    "qdisc",
                    "add",
                    "dev",
                    "cable",
                    "root",
                    "tbf",
                    "rate",
                    f"{mbit}mbit",
                    "burst",
                    "64kb",
                    "latency",
                    "200ms",
                ],
                check=True,
            )

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    @property
    def inside(self) -> Inside:
        return ["ip", "netns", "exec", self.names[0]], ["ip", "netns", "exec", self.names[1]]

    def sent(self) -> int:
        """Bytes that rank 0 has sent."""
        shown = subprocess.run(
            ["ip", "-n", self.names[0], "-s", "-j", "link", "show", "dev", "cable"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for name in self.names:
            self._ip("netns", "del", name)


def exchange(repeats: int, steps: int, mbit: int, folder: Path) -> None:
    data = text(folder)
    words = [
        *common(data),
        "--context_length",
        "64",
        "--batch.tokens",
        "1024",
        "--batch.micro",
        "8",
        "--data.validation",
        "0.02",
        "--max-steps",
        str(steps),
    ]
    os.environ["SLOW"] = ""
    link = Link(mbit)
    try:
        print(
            f"{steps} steps over {mbit} Mbit/s\n\n| comm | MB sent a step and rank | steps/s | × full | validation loss"
            " | change |\n|---|---|---|---|---|---|"
        )
        found: dict[str, list[tuple[float, float, float]]] = {}
        for repeat in range(repeats):
            for comm in COMMS:
                where, before = folder / f"{comm}-{repeat}", link.sent()
                launch(
                    "recipe",
                    where,
                    (1, 1),
                    [*words, "--comm", comm, "--train.seed", str(repeat)],
                    link.inside,
                    "10.77.0.1",
                )
                lines = metrics(where)
                when = [line["time"] for line in lines if "loss" in line and "val_loss" not in line]
                rate = (len(when) - 1 - WARM) / (when[-1] - when[WARM])
                found.setdefault(comm, []).append(
                    (
                        (link.sent() - before) / 1e6 / steps,
                        rate,
                        next(line["val_loss"] for line in lines if "val_loss" in line),
                    )
                )
        for comm, all_of_it in found.items():
            sent, rate, loss = (statistics.median(one) for one in zip(*all_of_it, strict=True))
            gain = statistics.median(mine[1] / full[1] for mine, full in zip(all_of_it, found["full"], strict=True))
            changes = [mine[2] - full[2] for mine, full in zip(all_of_it, found["full"], strict=True)]
            each = " / ".join(f"{one:+.4f}" for one in changes)
            print(f"| {comm} | {sent:.3f} | {rate:.2f} | {gain:.2f} | {loss:.4f} | {each} |", flush=True)
    finally:
        link.close()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        {"recipe": recipe, "dropin": dropin}[sys.argv[2]](int(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=("recipe", "dropin", "comm"), default=["recipe", "dropin"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", choices=("card", "work"), default="card", help="how a rank is slow")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--mbit", type=int, default=100, help="of the link between the two ranks, for comm")
    given = parser.parse_args()
    os.environ["SLOW"] = given.slow
    with tempfile.TemporaryDirectory(prefix="stoker-balance-") as folder:
        if kinds := [one for one in given.only if one != "comm"]:
            unlike(kinds, given.repeats, given.steps, Path(folder))
        if "comm" in given.only:
            exchange(given.repeats, given.steps, given.mbit, Path(folder))


if __name__ == "__main__":
    main()
