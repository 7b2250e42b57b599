"""Writes docs/verdicts.md from the catalogue:   python -m stoker.control.verdict.cause_docs > docs/verdicts.md"""

from __future__ import annotations

from stoker.contract import schedulers
from stoker.contract.discovery import import_modules
from stoker.control.verdict import hangs  # noqa: F401  its causes come first
from stoker.control.verdict.catalogue import CATALOGUE, Cause, load_exit_rules

_HEAD = """# Verdicts

Generated from the code by `python -m stoker.control.verdict.cause_docs`; a test keeps it current.

A run that fails ends with one cause, the guilty rank, the evidence and what to do: on the console, in `verdict.json`, and by `stoker why`.
A cause comes before its consequences: a rank that lost the connection to a peer is not guilty if another rank failed first. *Retried* says
whether `--max-restarts` starts another attempt; the same failure at the same place twice is not retried again. If no specific cause
fits, the verdict is the exception, the signal or the exit code (`rank.*`), or `unknown`. A refusal before the start can also carry the
id of one of the doctor's checks ([doctor.md](doctor.md)).
"""
_FAMILIES = {
    "completed": "Done", "unknown": "Unknown", "launch": "The command, the launcher and its decisions", "rank": "How one rank ended",
    "oom": "Memory of the GPU and of the host", "gpu": "GPUs and their driver", "nccl": "NCCL", "gloo": "gloo", "net": "Ports", "hang": "Hangs",
    "slow": "Slow ranks", "nan": "Bad numbers", "grpo": "GRPO", "data": "Files and data", "env": "Software environment", "torch": "Mistakes in the use of torch", "host": "Hosts and their limits",
    **{scheduler.name: scheduler.title for scheduler in schedulers.SCHEDULERS}, "role": "Roles of a job",
}  # fmt: skip


def make_page() -> str:
    load_exit_rules()
    import_modules(__package__)  # importing them registers the causes that are not read off a rank's exit
    families: dict[str, list[Cause]] = {}
    for cause in CATALOGUE.values():
        families.setdefault(cause.id.partition(".")[0], []).append(cause)
    order = list(_FAMILIES)
    names = sorted(families, key=lambda name: (order.index(name) if name in _FAMILIES else len(order), name))
    return _HEAD + "".join(
        f"\n## {_FAMILIES.get(name, name)}\n" + "".join(_make_section(cause) for cause in families[name])
        for name in names
    )


def _make_section(cause: Cause) -> str:
    lines = [f"\n### {cause.id}\n\n{cause.description}\n", f"- seen: {cause.seen}"]
    if cause.unless:
        lines.append(f"- another cause when: {cause.unless}")
    lines.append(f"- retried: {'yes' if cause.retryable else 'no'}")
    if cause.fix:
        lines.append("- what to do:")
        lines += [f"  {number}. {fix}" for number, fix in enumerate(cause.fix, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(make_page(), end="")
