"""The table of healthy shapes, for tests/e2e/test_healthy.py and benchmarks/healthy.py. Adding one is adding a row, and a script where none fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Shape:
    """A script with its arguments, and what is true of it."""

    name: str
    script: str
    args: str = ""
    ranks: int = 2
    silence_s: float = 5.0  # the longest time a rank neither steps, prints nor ends a collective, its start aside
    straggler: bool = False  # a rank truly is slower than its peers, and they wait for it: naming it is right
    hang_timeout_s: float | None = None  # the --hang-timeout it always runs with: shorter than its silence
    needs_py_spy: bool = False  # only its local variables show that it works
    neighbours: int = 0  # processes from outside that keep a core busy each
    in_ci: bool = False

    def command(self, seed: int, scale: float = 1.0) -> list[str]:
        return [str(HERE / self.script), *self.args.split(), "--seed", str(seed), "--scale", str(scale)]


ALONE_S, ALONE_TIMEOUT_S = 30, 10.0  # rank 0 works alone for three times the hang timeout


def alone(how: str, ranks: int = 2, needs_py_spy: bool = False, in_ci: bool = False) -> Shape:
    return Shape(
        f"rank 0 works alone: {how.replace('_', ' ')}",
        "evaluates_alone.py",
        f"--how {how} --seconds {ALONE_S}",
        ranks=ranks,
        silence_s=ALONE_S,
        hang_timeout_s=ALONE_TIMEOUT_S,
        needs_py_spy=needs_py_spy,
        in_ci=in_ci,
    )


SHAPES = (
    Shape("long first step, computing", "long_first_step.py", "--how busy", silence_s=25),
    Shape("long first step, waiting", "long_first_step.py", "--how sleep", silence_s=25, ranks=3),
    Shape("long first step on rank 0 only", "long_first_step.py", "--who rank0", silence_s=25),
    Shape(
        "90 s of silent preparation on rank 0",
        "long_first_step.py",
        "--who rank0 --how sleep --seconds 90.0",
        silence_s=90,
    ),
    Shape("90 s of silent preparation", "long_first_step.py", "--how sleep --seconds 90.0", silence_s=90),
    Shape("steps that become five times as slow", "slows_down.py", silence_s=10),
    Shape("long steps that become five times as slow", "slows_down.py", "--step 4.0 --slow 4", silence_s=30),
    alone("python_loop", ranks=3, in_ci=True),
    alone("numpy_on_one_line", needs_py_spy=True, in_ci=True),
    alone("torch_on_one_line", needs_py_spy=True),
    alone("model_calls"),
    alone("reads_files"),
    alone("writes_files"),
    alone("generates", ranks=3),
    alone("in_processes"),
    alone("in_a_program"),
    alone("in_programs_one_by_one"),
    alone("in_threads"),
    Shape("evaluation, marked", "evaluates.py", "--marked yes --seconds 20", silence_s=20),
    Shape(
        "evaluation, marked, on rank 0",
        "evaluates.py",
        "--marked yes --who rank0 --how sleep --seconds 40 --times 1",
        silence_s=40,
        ranks=3,
    ),
    Shape("evaluation, unmarked", "evaluates.py", "--seconds 12", silence_s=12),
    Shape(
        "evaluation, unmarked, waiting", "evaluates.py", "--how sleep --seconds 18", silence_s=18, ranks=1, in_ci=True
    ),
    Shape(
        "evaluation of 60 s, unmarked, on rank 0",
        "evaluates.py",
        "--who rank0 --seconds 60 --times 1",
        silence_s=60,
    ),
    Shape(
        "evaluation of 60 s, unmarked, on rank 0, waiting",
        "evaluates.py",
        "--who rank0 --how sleep --seconds 60 --times 1",
        silence_s=60,
        ranks=4,
    ),
    Shape("checkpoint of 30 s on rank 0", "saves.py", "", silence_s=30),
    Shape("checkpoint of 30 s on rank 0, one blocking call", "saves.py", "--how block", silence_s=30, ranks=3),
    Shape("checkpoint of 30 s on all ranks", "saves.py", "--who all", silence_s=30),
    Shape("checkpoint of 30 s on all ranks, marked", "saves.py", "--who all --marked yes --how block", silence_s=30),
    Shape("two checkpoints of 15 s on rank 0", "saves.py", "--seconds 15 --times 2", silence_s=15),
    Shape("uneven steps", "uneven.py", "", silence_s=12),
    Shape("uneven steps, four ranks", "uneven.py", "--steps 150", silence_s=12, ranks=4),
    Shape("one rank logs nothing", "quiet_ranks.py", "--speaks 1"),
    Shape("no rank logs anything", "quiet_ranks.py", "--speaks 0", ranks=3),
    Shape("one rank alone", "quiet_ranks.py", "--speaks 1", ranks=1),
    Shape("a busy neighbour", "quiet_ranks.py", "--speaks 2", neighbours=2),
    Shape("pauses between epochs", "epochs.py", "", silence_s=15),
    Shape("pauses between epochs, computing", "epochs.py", "--how busy", silence_s=15),
    Shape("slow batches, forked workers", "loader.py", "", silence_s=8),
    Shape("slow batches, spawned workers", "loader.py", "--context spawn", silence_s=8),
    Shape("a Trainer's loop", "trainer.py", "", silence_s=15),
    Shape("independent replicas", "replicas.py", ""),
    Shape("independent replicas, four ranks", "replicas.py", "", ranks=4),
    Shape("tokenising", "tokenises.py", ""),
    Shape("tokenising, one long shard", "tokenises.py", "--seconds 18 --shards 2", silence_s=18),
    Shape("collectives only", "only_collectives.py", "", silence_s=10),
    Shape("asleep most of the time", "sleeper.py", "", silence_s=12, in_ci=True),
    Shape("gradient accumulation", "accumulates.py", ""),
    Shape("two optimizers", "two_optimizers.py", ""),
    Shape("a rank that joins late", "joins_late.py", "", silence_s=20),
    Shape("subgroups", "subgroups.py", "--slower 0", ranks=4),
    Shape("subgroups, one of them slower", "subgroups.py", "", ranks=4, straggler=True),
    Shape("pipeline of two stages", "pipeline.py", ""),
    Shape("pipeline of four stages", "pipeline.py", "--steps 40", ranks=4),
    Shape("handlers, hooks and stdout replaced", "replaces.py", "", silence_s=15),
    Shape("NaN and inf in the text", "strange_numbers.py", ""),
    Shape("the GIL held", "holds_the_gil.py", ""),
    Shape("beats of its own, a wild loss", "beats.py", "", silence_s=6),
    Shape("a straggler", "straggles.py", "", ranks=3, straggler=True),
)
