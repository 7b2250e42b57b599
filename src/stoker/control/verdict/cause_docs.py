"""docs/verdicts.md, made from the catalogue itself:   python -m stoker.control.verdict.cause_docs > docs/verdicts.md"""

from __future__ import annotations

from stoker.contract import schedulers
from stoker.contract.discovery import modules_in
from stoker.control.verdict import hangs  # noqa: F401  its causes come first
from stoker.control.verdict.catalogue import CATALOGUE, Cause, rules

_HEAD = """# Verdicts

Made from the code by `python -m stoker.control.verdict.cause_docs`; a test keeps it current.

A run that fails ends with one cause, the guilty rank, what shows it, and what to do: on the console, in `verdict.json`, and by `stoker why`.
A cause comes before its consequences: a peer that lost its connection is not guilty while another rank failed by itself. *Tried again* says
whether `--max-restarts` starts another attempt after it; the same failure at the same place twice is not tried a third time. Where none of the
causes fits, the verdict is the exception, the signal or the exit code (`rank.*`), or `unknown`. A refusal before the start can also carry the
id of one of the doctor's checks ([doctor.md](doctor.md)).
"""
_FAMILIES = {
    "completed": "Done", "unknown": "Unknown", "launch": "What Stoker was told or decided", "rank": "What one rank did by itself",
    "oom": "Memory, of the GPU and of the host", "gpu": "GPUs and their driver", "nccl": "NCCL", "gloo": "gloo", "net": "Ports", "hang": "Hangs",
    "slow": "Slowness", "nan": "Numbers", "grpo": "Learning from rewards", "data": "Files and data", "env": "Software", "torch": "How a program uses torch", "host": "Hosts and their limits",
    **{one.name: one.title for one in schedulers.SCHEDULERS},
}  # fmt: skip


def page() -> str:
    rules()
    modules_in(__package__)  # the causes that no rule finds
    families: dict[str, list[Cause]] = {}
    for one in CATALOGUE.values():
        families.setdefault(one.id.partition(".")[0], []).append(one)
    order = list(_FAMILIES)
    chosen = sorted(families, key=lambda name: (order.index(name) if name in _FAMILIES else len(order), name))
    return _HEAD + "".join(
        f"\n## {_FAMILIES.get(name, name)}\n" + "".join(_section(one) for one in families[name]) for name in chosen
    )


def _section(one: Cause) -> str:
    lines = [f"\n### {one.id}\n\n{one.says}\n", f"- seen: {one.seen}"]
    if one.contradicts:
        lines.append(f"- another cause when: {one.contradicts}")
    lines.append(f"- tried again: {'yes' if one.retryable else 'no'}")
    if one.fix:
        lines.append("- what to do:")
        lines += [f"  {number}. {fix}" for number, fix in enumerate(one.fix, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
