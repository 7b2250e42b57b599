"""SFT on 200 chats with nothing but defaults: what the model learns of them, and what it forgets of the rest.

    stoker speedrun --preset cpu --until eval-sft            # the model; its folder is runs/speedrun-cpu
    python benchmarks/small_sft.py runs/speedrun-cpu [--from sft|midtrain] [--seeds 0 1 2] [-- more options of stoker train sft]

From sft: 200 chats of a kind that the built-in data set has not (greeting and thanking by name); held out are names that no chat has.
From midtrain: the first 200 of the data set's own SFT chats. The rest is the data set's held-out questions. `marked` is how
`stoker train evaluate` counts; `content` takes an answer in any form: the right word anywhere, or the right last number.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from typing import Any

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
]
THINGS = ["ball", "book", "box", "cup", "hat", "key", "lamp", "rope", "stone", "coin"]
GREET = (
    "I am {n}. Greet me.",
    "My name is {n}. Say hello to me.",
    "Greet me, I am {n}.",
    "Say hello. I am {n}.",
    "I am {n}. Please greet me.",
)
THANK = ("{n} gave you the {t}. Thank {n}.", "{n} brings you the {t}. Say thanks to {n}.", "Thank {n} for the {t}.")
NEW = "manners"
CHATS, HELD_OUT = 200, 100


def manners(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(chats, held-out questions)."""
    draw = random.Random(seed)
    strangers = set(draw.sample(NAMES, 4))
    chats: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    while len(chats) < CHATS or len(questions) < HELD_OUT:
        name, thing, greets = draw.choice(NAMES), draw.choice(THINGS), draw.random() < 0.5
        asked = draw.choice(GREET if greets else THANK).format(n=name, t=thing)
        answer = f"hello {name}" if greets else f"thanks {name}"
        said = f"Hello, {name}." if greets else f"Thank you for the {thing}, {name}."
        if name in strangers and len(questions) < HELD_OUT:
            questions.append({"prompt": asked, "answer": answer, "kind": NEW})
        elif name not in strangers and len(chats) < CHATS:
            chats.append(
                {
                    "messages": [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": f"{said} The answer is {answer}."},
                    ]
                }
            )
    return chats, questions


def same_content(row: dict[str, Any]) -> bool:
    answer, text = row["answer"].lower(), row["completion"].lower()
    wanted = re.findall(r"\d+", answer)
    if not wanted:
        return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None
    numbers = re.findall(r"\d+", text)
    if row["kind"] == "order" and len(wanted) == 1:  # "16 is more than 2" says 16
        return numbers[:1] == wanted or re.findall(r"\d+", text.split("answer is")[-1])[:1] == wanted
    return numbers[-len(wanted) :] == wanted


def train(stage: str, runs: str, words: list[str]) -> str:
    """The run directory."""
    command = [
        sys.executable,
        "-m",
        "stoker",
        "train",
        stage,
        "--runs-dir",
        runs,
        "--name",
        stage,
        "--no-preflight",
        "--quiet",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    print(
        "\n".join(line for line in done.stderr.splitlines() if line.startswith((f"{stage}: ", "  ", "warning"))),
        file=sys.stderr,
    )
    return glob.glob(os.path.join(runs, f"*-{stage}"))[0]


def shares(model: str, world: str, more: list[str], runs: str) -> dict[str, tuple[float, float]]:
    """Per kind (marked, content), in percent; bits per byte of plain text twice."""
    tasks = [os.path.join(world, "questions.jsonl"), os.path.join(world, "prompts-held-out.jsonl"), *more]
    words = [f"--evaluate.tasks={task}" for task in tasks] + [
        "--evaluate.texts",
        os.path.join(world, "base-held-out.jsonl"),
        "--model.load",
        model,
    ]
    run = train(
        "evaluate",
        runs,
        [*words, "--preset", "small", "--context-length", "192", "--batch.tokens", "0", "--generate.new_tokens", "64"],
    )
    with open(os.path.join(run, "completions.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with open(os.path.join(run, "result.json"), encoding="utf-8") as file:
        per_byte = json.load(file)["metrics"]["bits_per_byte"]
    parts = {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
    parts["the rest"] = [row for row in rows if row["kind"] != NEW]
    found = {
        kind: (100 * sum(row["correct"] for row in part) / len(part), 100 * sum(map(same_content, part)) / len(part))
        for kind, part in parts.items()
    }
    return found | {"bits per byte": (per_byte, per_byte)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chain", help="folder of a speedrun")
    parser.add_argument("--from", dest="stage", choices=("sft", "midtrain"), default="sft")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    told, options = parser.parse_args(words[:cut]), words[cut + 1 :]
    (world,) = glob.glob(os.path.join(told.chain, "stages", "world-*"))
    model = sorted(glob.glob(os.path.join(told.chain, "stages", f"[0-9]*-[0-9]*-{told.stage}-*", "hf")))[-1]
    results = []
    for seed in told.seeds:
        with tempfile.TemporaryDirectory() as folder:
            chats, held_out = os.path.join(folder, "chats.jsonl"), os.path.join(folder, f"{NEW}.jsonl")
            if told.stage == "sft":
                for path, rows in zip((chats, held_out), manners(seed), strict=True):
                    with open(path, "w", encoding="utf-8") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)
            else:
                with (
                    open(os.path.join(world, "sft.jsonl"), encoding="utf-8") as source,
                    open(chats, "w", encoding="utf-8") as file,
                ):
                    file.writelines(line for line, _ in zip(source, range(CHATS), strict=False))
            more = [held_out] if told.stage == "sft" else []
            before = shares(model, world, more, os.path.join(folder, "before"))
            settings = [
                "--model.load",
                model,
                "--data",
                chats,
                "--data.seed",
                str(seed),
                "--train.seed",
                str(seed),
                *options,
            ]
            run = train("sft", os.path.join(folder, "runs"), settings)
            results.append((before, shares(os.path.join(run, "hf"), world, more, os.path.join(folder, "after"))))
    print("| kind | marked before | after | content before | after |\n|---|---|---|---|---|")
    for kind in results[0][0]:
        means = [
            sum(result[moment][kind][way] for result in results) / len(results) for way in (0, 1) for moment in (0, 1)
        ]
        print(
            f"| {kind} | "
            + " | ".join(f"{mean:.3f}" if kind == "bits per byte" else f"{mean:.1f} %" for mean in means)
            + " |"
        )


if __name__ == "__main__":
    main()
