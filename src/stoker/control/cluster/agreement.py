"""Is the program the same on all hosts? Answers of the agents' `files` probe in, lines out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

_NAMED = 3  # files named per host


def remedy(script: str, folder: str, synced: bool) -> str:
    """What to do where a host lacks the script. `folder`: the one that --sync copies, and did if `synced`."""
    if not synced:
        return "copy it with --sync, or set workdir:"
    if os.path.relpath(os.path.join(folder, script), folder).startswith(os.pardir + os.sep):
        return f"it is not below {folder}, which --sync copies"
    if os.path.isabs(script):
        return f"name it by its path below {folder}, which --sync copies to workdir:"
    return "--sync leaves it out: git ignores it, or it is in a folder that is not copied"


def disagreements(answers: Mapping[str, Mapping[str, Any]], script: str = "the script", lacking: str = "") -> list[str]:
    """A line for each host that has not what most have, or the first has, and one for all that lack it. `lacking`: what to do where it is not there."""
    asked = {host: answer for host, answer in answers.items() if "error" not in answer}
    failed = {host: answer["error"] for host, answer in answers.items() if "error" in answer}
    lines = [f"host {host}: {script} could not be compared: {why}" for host, why in failed.items()]
    missing = [host for host, answer in asked.items() if not answer["names"]]
    if missing:
        which = f"host{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        lines.append(f"{which}: {script} does not exist there; {lacking or remedy(script, '', False)}")
    there = {host: answer for host, answer in asked.items() if host not in missing}
    if not there:
        return lines
    reference = _reference(there)
    for host, answer in there.items():
        if answer["package"] != there[reference]["package"]:
            difference = _difference(answer["names"], there[reference]["names"], reference)
            lines.append(f"host {host}: {difference}; copy it with --sync")
    return lines


def _reference(answers: Mapping[str, Mapping[str, Any]]) -> str:
    counts = Counter(answer["package"] for answer in answers.values())
    return max(answers, key=lambda host: counts[answers[host]["package"]])  # the first of the most


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str], reference: str) -> str:
    changed = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    parts = [f"{_some(changed)} differ{'s' if len(changed) == 1 else ''} from host {reference}'s"] if changed else []
    lacking = [name for name in theirs if name not in mine]
    more = [name for name in mine if name not in theirs]
    parts += [f"lacks {_some(lacking)}"] if lacking else []
    parts += [f"has {_some(more)} besides"] if more else []
    return ", ".join(parts)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
