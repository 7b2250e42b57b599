"""What a name was probably meant to be, "(did you mean ...?)", or nothing: a poor guess misleads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

MAX_NAME = 200  # letters of a name: comparing takes their product
MIN_NAME = 3  # letters: of two, nobody can say what was meant


def suggest(word: str, known: Iterable[str]) -> str:
    """A beginning that is nearly right counts as much as the whole: people abbreviate."""
    names = list(known)
    best = _nearest(word, names, lambda name: name) or _only_one_with_these_words(word, names)
    return f" (did you mean {best}?)" if best else ""


def suggest_file(path: str, known: Iterable[str]) -> str:
    """Names are compared without their ending: that all of them end in .txt makes none alike."""
    import os

    folder, name = os.path.split(path)
    best = _nearest(_stem(name), list(known), _stem, abbreviated=False)
    return f" (did you mean {os.path.join(folder, best)}?)" if best else ""


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _nearest(word: str, names: list[str], part: Callable[[str], str], abbreviated: bool = True) -> str:
    core = len(word.strip("-_."))
    if core < MIN_NAME or len(word) > MAX_NAME:
        return ""
    allowed = max(core // 4, 1)
    found: list[tuple[int, bool, int, str]] = []
    for place, name in enumerate(names):
        whole = part(name)
        if len(whole) > MAX_NAME:
            continue
        beginnings = [whole[: len(word) + more] for more in (-1, 0, 1) if abbreviated and len(word) + more < len(whole)]
        for candidate in (whole, *beginnings):
            if _numbers(candidate) == _numbers(word):
                found.append((edit_distance(word, candidate), candidate != whole, place, name))
        if len(whole) >= MIN_NAME - 1 and word.startswith(whole) and 2 * len(whole) >= len(word):
            found.append((allowed, True, place, name))
    best = min(found, default=(allowed + 1, True, 0, ""))
    return best[3] if best[0] <= allowed else ""


def _only_one_with_these_words(word: str, names: list[str]) -> str:
    """`--steps` may mean --max-steps, if nothing else has steps."""
    words = set(re.split(r"[-_.\s]+", word.strip("-_.")))
    found = [name for name in names if words <= set(re.split(r"[-_.\s]+", name))]
    return found[0] if len(found) == 1 and all(len(one) > MIN_NAME for one in words) else ""


def _numbers(text: str) -> list[str]:
    """Another number is no typo: part-2 is not part-1 misspelt."""
    return re.findall(r"\d+", text)


def edit_distance(a: str, b: str) -> int:
    """Letters to add, drop, replace, or swap with their neighbour."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before, above, row = row, before, [i]
        for j, right in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and left == b[j - 2] and a[i - 2] == right:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]
