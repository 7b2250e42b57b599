"""What the chain was: what is missing, hardware, time and cost, failures, next steps. Pure: a Chain in, blocks out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from stoker.contract.units import finite_number, format_bytes, format_duration
from stoker.speedrun.gather import MODELS, Chain, StageRecord
from stoker.training.stages.blocks import Block, Bullets, Cell, Code, Figure, Heading, Table, Text
from stoker.training.stages.registry import links
from stoker.training.stages.significance import ABSENT, number

# What makes something first, then what measures it.
EXPECTED = tuple(link.name for link, _ in sorted(links(), key=lambda pair: pair[1].measures))
BIGGER = {"cpu": "gpu", "gpu": "d20", "d20": "d32"}
# Said in words, or of no use here.
_HARDWARE_KEYS = ["schema", "gpus", "cores", "memory_total", "memory_available", "max_processes", "max_files", "python"]
_BILLED = ("seconds", "attempts", "energy_wh", "cost")
MOST_TROUBLES = 8  # of one stage; `stoker why` has them all


def unfinished(chain: Chain) -> list[str]:
    """`world` is not expected: with data of one's own there is none."""
    absent = [name for name in EXPECTED if chain.result(name) is None]
    return absent + [
        name for name, found in chain.stages.items() if not found.done and name not in (*EXPECTED, "world")
    ]


def missing(chain: Chain) -> Iterator[Block]:
    absent = unfinished(chain)
    if absent:
        names = ", ".join(_with_status(chain, name) for name in absent)
        yield Text(
            f"Not finished: {names}. Run the same command to continue. Results that need these stages are missing"
            " below.",
            lead=True,
        )


def _with_status(chain: Chain, name: str) -> str:
    found = chain.stages.get(name)
    return f"{name} ({found.status})" if found is not None else name


def hardware(chain: Chain) -> Iterator[Block]:
    yield Heading("Hardware")
    lines = hardware_lines(chain.hardware)
    versions = next((found.versions for found in chain.stages.values() if found.versions), {})
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if isinstance(value, (str, int, float)))
    yield Bullets((*lines, *([told] if told else ()))) if lines or told else Text(ABSENT)


def hardware_lines(data: dict[str, Any]) -> tuple[str, ...]:
    """What the machine is, most telling first. Keys as machine/model.py names them; others are shown as they are."""
    rest = {key: value for key, value in data.items() if key not in _HARDWARE_KEYS}
    lines = []
    cards = data.get("gpus")
    if isinstance(cards, list) and cards:
        names = [_card(card) for card in cards]
        lines.append(", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))
    elif isinstance(cards, int) and not isinstance(cards, bool) and cards:
        lines.append(f"{cards} GPU{'s' if cards > 1 else ''}")
    cores, memory = finite_number(data, "cores"), finite_number(data, "memory_total")
    if cores is not None:
        lines.append(f"{cores:.0f} CPU core{'s' if cores != 1 else ''}")
    if memory is not None:
        lines.append(f"{format_bytes(memory)} RAM")
    lines += [
        f"{key.replace('_', ' ')}: {value}"
        for key, value in rest.items()
        if isinstance(value, (str, int, float)) and value != ""
    ]
    return tuple(lines)


def _card(card: Any) -> str:
    if not isinstance(card, dict):
        return str(card)
    memory = finite_number(card, "memory_total")
    return f"{card.get('name') or 'GPU'}" + (f" ({format_bytes(memory)})" if memory else "")


def total_of(chain: Chain, what: str) -> float | None:
    values = [value for found in chain.stages.values() if (value := getattr(found, what)) is not None]
    return sum(values) if values else None


def bill(chain: Chain) -> Iterator[Block]:
    yield Heading("Time, energy and cost")
    if not chain.stages:
        yield Text("No stage was started.")
        return
    rows = [
        _bill_row(
            Cell(found.name, "" if found.done or found.status == "done" else found.status),
            *(getattr(found, what) for what in _BILLED),
        )
        for found in chain.stages.values()
    ]
    sums = _bill_row(Cell("all"), *(total_of(chain, what) for what in _BILLED))
    yield Table(("Stage", "Time", "Attempts", "Energy", "Cost"), (*rows, sums))
    yield Figure("time", "Time of each stage")


def _bill_row(
    name: Cell, seconds: float | None, attempts: float | None, energy: float | None, cost: float | None
) -> tuple[Cell, ...]:
    return (
        name,
        Cell(format_duration(seconds) if seconds else ABSENT),
        Cell(f"{attempts:.0f}" if attempts else ABSENT),
        Cell(ABSENT if energy is None else f"{number(energy)} Wh"),
        Cell(ABSENT if cost is None else f"{cost:,.{3 if cost < 1 else 2}f}"),
    )


def failures(chain: Chain) -> Iterator[Block]:
    yield Heading("Failures and restarts")
    told = [line for found in chain.stages.values() for line in _told(found)]
    yield Bullets(tuple(told)) if told else Text("No stage failed or was restarted.")


def _told(found: StageRecord) -> Iterator[str]:
    for line in found.troubles[:MOST_TROUBLES]:
        yield f"{found.name}: {line}"
    if len(found.troubles) > MOST_TROUBLES:
        yield f"{found.name}: and {len(found.troubles) - MOST_TROUBLES} more; events.jsonl in {found.run} has them"
    if found.status == "failed" and not found.troubles:
        yield f"{found.name}: failed; its logs are in {found.run or 'no run directory'}"


def going_on(chain: Chain) -> Iterator[Block]:
    yield Heading("Next steps")
    last = next((found for name in reversed(MODELS) if (found := chain.result(name)) is not None and found.run), None)
    lines = []
    if last is not None:
        near = os.path.relpath(chain.folder)
        model = os.path.join(chain.folder if near.startswith("..") else near, last.run, "hf")
        lines += [f"stoker chat {model}", f"stoker export {model} my-model"]
    if unfinished(chain):
        lines.append(f"stoker speedrun --preset {chain.preset or 'cpu'}        # continues where this stopped")
    bigger = BIGGER.get(chain.preset)
    if bigger:
        lines.append(f"stoker speedrun --preset {bigger}" + (" --data FOLDER" if bigger.startswith("d") else ""))
    lines.append(
        "stoker speedrun --set grpo-density:grpo.kl=0.05 --plan        # which stages a changed setting would run again"
    )
    yield Code(tuple(lines))
