"""What the chain is fed: the built-in world, or a folder of the user's with the world for what is missing there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.shape import shape
from stoker.speedrun.data import HELD_OUT, PARQUET, ROWS, Found, find
from stoker.speedrun.rows import FAULTS, check_once, check_questions, check_text, copy_usable, judge
from stoker.speedrun.stages import FILES, OUR_WORLD, Data, File, Place
from stoker.training.data.digests import digest_files

_ONE_FILE = ("pairs", "prompts", *(name for name in FILES if name.endswith(HELD_OUT)))  # keys that name one path


@shape
class Copy:
    """Usable rows that must be written before a stage reads them."""

    role: str
    sources: tuple[str, ...]
    target: str


@shape
class Material:
    data: Data
    copies: tuple[Copy, ...] = ()

    def make_copies(self) -> None:
        for copy in self.copies:
            if not os.path.exists(copy.target):
                copy_usable(copy.role, copy.sources, copy.target)


class Digests:
    """Of files by their bytes; of folders by the names, sizes and times of what they hold."""

    def __init__(self, cache: str) -> None:
        self._cache = cache

    def of(self, path: str) -> str:
        if os.path.isdir(path):
            inside = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
            told = [
                (os.path.relpath(one, path), os.stat(one).st_size, os.stat(one).st_mtime_ns) for one in sorted(inside)
            ]
            return "folder " + together([repr(one) for one in told])
        return digest_files([path], self._cache, len(os.sched_getaffinity(0)), lambda line: None)[0]


def together(digests: Sequence[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def material(folder: str | None, speedrun: str, digests: Digests, cache: str) -> Material:
    """`speedrun`: the folder where copies go."""
    if folder is None:
        return Material(OUR_WORLD)
    found = find(folder)
    places: dict[str, tuple[Place, ...]] = {}
    copies: list[Copy] = []
    lines = []
    for role, paths in found.roles.items():
        places[role], copied, said = _role(
            role,
            [os.path.abspath(path) for path in paths],
            os.path.join(os.path.abspath(speedrun), "data"),
            digests,
            cache,
        )
        copies += copied
        lines += said
    lines = [_summary(folder, found), *lines]
    wanted = [role for role in FILES if not role.endswith(HELD_OUT)]
    missing = [role for role in wanted if role not in places]
    for role in missing:
        if role + HELD_OUT in places:
            unfit = ", ".join(os.path.relpath(path, folder) for path in found.roles[role + HELD_OUT])
            lines.append(
                f"not used: {unfit}, because the folder has no {role}: what is held out of the built-in world's goes"
                " with that"
            )
        places |= {one: OUR_WORLD.places[one] for one in (role, role + HELD_OUT) if one in FILES}
    if missing:
        lines.append(f"from the built-in world, because the folder has none: {', '.join(missing)}")
    return Material(Data(places, tuple(lines)), tuple(copies))


def _role(
    role: str, paths: list[str], folder: str, digests: Digests, cache: str
) -> tuple[tuple[Place, ...], list[Copy], list[str]]:
    known = {path: digests.of(path) for path in paths}
    kind = role.removesuffix(HELD_OUT)
    if kind == "questions":
        for path in paths:
            check_questions(path, known[path], cache)
    if kind == "base":
        for path in paths:
            check_text(path, known[path], cache)
    rows = [path for path in paths if path.lower().endswith((*ROWS, PARQUET))] if kind in FAULTS else []
    said = [line for path in rows if (line := judge(path, check_once(kind, path, known[path], cache)))]
    others = [path for path in paths if path not in rows]
    if role in _ONE_FILE and len(paths) > 1 and (others or not rows):
        raise Refusal(
            f"--data: {len(paths)} files for {role} ({', '.join(map(os.path.basename, paths[:4]))}): make them one",
            EX_DATAERR,
        )
    as_lines = kind in ("pairs", "prompts") and any(
        path.lower().endswith(PARQUET) for path in rows
    )  # their stages read jsonl
    if not said and not as_lines and not (role in _ONE_FILE and len(rows) > 1):
        return tuple(File(path, known[path]) for path in paths), [], []
    digest = together([known[path] for path in rows])
    copy = Copy(kind, tuple(rows), os.path.join(folder, f"{role}-{digest[:12]}.jsonl"))
    return (File(copy.target, digest), *(File(path, known[path]) for path in others)), [copy], said


def _summary(folder: str, found: Found) -> str:
    told = "; ".join(
        f"{role}:"
        f" {', '.join(os.path.relpath(path, folder) for path in paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
        for role, paths in found.roles.items()
    )
    unused = f"; not used: {', '.join(found.unused[:6])}{' …' if len(found.unused) > 6 else ''}" if found.unused else ""
    return f"data {folder}: {told}{unused}"
