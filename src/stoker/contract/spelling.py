"""Suggests what a misspelt name was meant to be: " (did you mean ...?)". Suggests nothing rather than a poor guess."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

MAX_NAME = 200  # characters: a comparison takes the product of two lengths
MIN_NAME = 3  # characters: a name of two could mean too many things


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return a suggestion for a name, or "". A match of a choice's beginning counts as a match: people abbreviate."""
    names = list(choices)
    best = _find_nearest(name, names, lambda choice: choice) or _find_only_match_by_words(name, names)
    return f" (did you mean {best}?)" if best else ""


def suggest_file(path: str, choices: Iterable[str]) -> str:
    """Return a suggestion for a path, or "". File endings are not compared: all .txt files would look alike."""
    import os

    folder, name = os.path.split(path)
    best = _find_nearest(_stem(name), list(choices), _stem, abbreviated=False)
    return f" (did you mean {os.path.join(folder, best)}?)" if best else ""


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _find_nearest(name: str, choices: list[str], key: Callable[[str], str], abbreviated: bool = True) -> str:
    """Return the choice whose key is nearest to the name, or "" if all are further than a quarter of its length."""
    core_length = len(name.strip("-_."))
    if core_length < MIN_NAME or len(name) > MAX_NAME:
        return ""
    max_distance = max(core_length // 4, 1)
    matches: list[tuple[int, bool, int, str]] = []  # (distance, is only a part of it, position, choice)
    for position, choice in enumerate(choices):
        text = key(choice)
        if len(text) > MAX_NAME:
            continue
        lengths = [len(name) + extra for extra in (-1, 0, 1) if abbreviated and len(name) + extra < len(text)]
        for candidate in (text, *(text[:length] for length in lengths)):
            if _numbers(candidate) == _numbers(name):
                matches.append((edit_distance(name, candidate), candidate != text, position, choice))
        if len(text) >= MIN_NAME - 1 and name.startswith(text) and 2 * len(text) >= len(name):
            matches.append((max_distance, True, position, choice))
    best = min(matches, default=(max_distance + 1, True, 0, ""))
    return best[3] if best[0] <= max_distance else ""


def _find_only_match_by_words(name: str, choices: list[str]) -> str:
    """Return the only choice that has all words of the name: `--steps` may mean --max-steps."""
    words = set(re.split(r"[-_.\s]+", name.strip("-_.")))
    matches = [choice for choice in choices if words <= set(re.split(r"[-_.\s]+", choice))]
    return matches[0] if len(matches) == 1 and all(len(word) > MIN_NAME for word in words) else ""


def _numbers(text: str) -> list[str]:
    """Return the numbers in a name. They must be equal: part-2 is not a misspelt part-1."""
    return re.findall(r"\d+", text)


def edit_distance(a: str, b: str) -> int:
    """Return the number of characters to add, drop, replace, or swap with their neighbour."""
    previous: list[int] = []
    row = list(range(len(b) + 1))
    for i, a_character in enumerate(a, 1):
        previous, before_previous, row = row, previous, [i]
        for j, b_character in enumerate(b, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a_character != b_character))
            if i > 1 and j > 1 and a_character == b[j - 2] and a[i - 2] == b_character:
                cost = min(cost, before_previous[j - 2] + 1)
            row.append(cost)
    return row[-1]
