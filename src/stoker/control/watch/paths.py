"""Which ranks left the path of the others: the operations of all ranks side by side, up to the first that differs.
Pure.

What decides, in this order: what most ranks entered there, and then each rank's own past (training repeats itself, so
the next operation is known before it is entered). Where neither decides it is a tie, and nobody is accused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.contract.collectives import likeness
from stoker.contract.quantities import ranks_text
from stoker.contract.shape import shape
from stoker.control.watch import stacks
from stoker.control.watch.snapshot import Group, Op, Snapshot

Place = tuple[str, int]  # file and line of the script


@shape
class Party:
    """Ranks that did the same."""

    ranks: tuple[int, ...]
    group: str = ""
    op: Op | None = None  # None: nobody knows, gloo ended these ranks and their recorders with them


@shape
class Parting:
    parties: tuple[Party, ...]  # those that left the path first
    odd: tuple[int, ...]  # the ranks that left it; none: a tie
    how: str  # it is known


@shape
class Step:
    """One operation of a rank, made comparable between ranks."""

    key: tuple[object, ...]
    group: str
    op: Op


def parting(snapshots: Mapping[int, Snapshot], members: Mapping[str, tuple[int, ...]], world: int) -> Parting | None:
    """Of all ranks; where their programs differ by design (stages of a pipeline), of the members of one group."""
    known = {rank: one for rank, one in snapshots.items() if any(group.ops for group in one.groups)}
    mute = {rank: one for rank, one in snapshots.items() if rank not in known and one.main}
    candidates = [
        tuple(known),
        *(members_of(group, rank, members, world) for rank, one in known.items() for group in one.groups),
    ]
    for ranks in dict.fromkeys(tuple(sorted(set(ranks) & known.keys())) for ranks in candidates):
        parties = _first_difference({rank: known[rank] for rank in ranks}, members, world)
        if parties:
            return decided(_with_mute(parties, known, mute))
    return None


def from_silence(snapshots: Mapping[int, Snapshot]) -> Parting | None:
    """gloo ended some ranks because sizes differ, and those it left agree with each other: then the ended ones did
    something else.
    """
    known = {rank: one for rank, one in snapshots.items() if any(group.ops for group in one.groups)}
    mute = tuple(sorted(rank for rank in snapshots if rank not in known))
    under_way = [
        (op.order, group.name, op)
        for rank in sorted(known)[:1]
        for group in known[rank].groups
        for op in group.ops
        if not op.done
    ]
    if not mute or not under_way:
        return None
    _, group, op = min(under_way, key=lambda entry: entry[0])
    return decided([Party(tuple(sorted(known)), group, op), Party(mute)])


def members_of(group: Group, rank: int, members: Mapping[str, tuple[int, ...]], world: int) -> tuple[int, ...]:
    if group.name in members:
        return members[group.name]
    if group.ranks:
        return group.ranks
    return tuple(range(world)) if group.about == "default_pg" or group.name == "0" else (rank,)


# ---- side by side ----


def _first_difference(
    snapshots: Mapping[int, Snapshot], members: Mapping[str, tuple[int, ...]], world: int
) -> list[Party]:
    if len(snapshots) < 2:
        return []
    names = {rank: _group_names(one, snapshots, members, world) for rank, one in snapshots.items()}
    shared = set.intersection(*(set(own.values()) for own in names.values()))
    # Groups that some of these ranks are not in say nothing about them. What is left is aligned by an operation that
    # all recorders still hold.
    paths = {
        rank: [step for step in _path(one, names[rank]) if step.key[0] in shared] for rank, one in snapshots.items()
    }
    used = set.intersection(*({step.key[0] for step in path} for path in paths.values()))
    if not used:
        return []
    anchor = min(used, key=lambda which: (-_count(paths, which), str(which)))
    start = max(next(step.op.seq for step in path if step.key[0] == anchor) for path in paths.values())
    aligned = {rank: _from(path, anchor, start) for rank, path in paths.items()}
    for number in range(max(len(path) for path in aligned.values())):
        here = {rank: path[number] for rank, path in aligned.items() if len(path) > number}
        parties: dict[tuple[object, ...], list[int]] = {}
        for rank, step in here.items():
            parties.setdefault(step.key, []).append(rank)
        if len(parties) > 1:
            if all(step.op.done for step in here.values()):
                return []  # they differ and it held up nobody: programs that differ by design
            return [_party(here, ranks) for ranks in parties.values()]
    return []


def _party(here: Mapping[int, Step], ranks: list[int]) -> Party:
    """Shown by one that still waits in it, and whose past says whether it is the usual operation."""
    step = max((here[rank] for rank in ranks), key=lambda step: (not step.op.done, step.op.usual is not None))
    return Party(tuple(sorted(ranks)), step.group, step.op)


def _group_names(
    snapshot: Snapshot, snapshots: Mapping[int, Snapshot], members: Mapping[str, tuple[int, ...]], world: int
) -> dict[str, tuple[object, ...]]:
    """The groups a rank is in, used or not, by names that mean the same on every rank: its second group of four ranks."""
    sizes = {group.name: len(members_of(group, snapshot.rank, members, world)) for group in snapshot.groups}
    sizes |= {name: len(ranks) for name, ranks in members.items() if snapshot.rank in ranks}
    about = {group.name: group.about for one in snapshots.values() for group in one.groups}
    names: dict[str, tuple[object, ...]] = {}
    counted: dict[object, int] = {}
    for name in sorted(sizes, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)):
        kind = (about.get(name, ""), sizes[name])
        counted[kind] = counted.get(kind, 0) + 1
        names[name] = (*kind, counted[kind])
    return names


def _path(snapshot: Snapshot, names: Mapping[str, tuple[object, ...]]) -> list[Step]:
    """All collectives of a rank in the order it made them."""
    steps = [
        Step((names[group.name], group.backend, *likeness(op.name, op.sizes)), group.name, op)
        for group in snapshot.groups
        for op in group.ops
        if not op.p2p
    ]
    return sorted(steps, key=lambda step: step.op.order)


def _count(paths: Mapping[int, list[Step]], which: object) -> int:
    return min(sum(step.key[0] == which for step in path) for path in paths.values())


def _from(path: list[Step], anchor: object, seq: int) -> list[Step]:
    return path[
        next((number for number, step in enumerate(path) if step.key[0] == anchor and step.op.seq >= seq), len(path)) :
    ]


# ---- who is wrong ----


def place_of(snapshot: Snapshot) -> Place | None:
    frame = stacks.users_frame(snapshot.main)
    return (frame.file, frame.line) if frame is not None else None


def _with_mute(parties: list[Party], known: Mapping[int, Snapshot], mute: Mapping[int, Snapshot]) -> list[Party]:
    """A rank without a recorder belongs to those at whose line it was."""
    joined = [list(party.ranks) for party in parties]
    for rank, one in mute.items():
        there = [
            number
            for number, party in enumerate(parties)
            if place_of(one) in {place_of(known[peer]) for peer in party.ranks}
        ]
        if len(there) == 1:
            joined[there[0]].append(rank)
    return [Party(tuple(sorted(ranks)), party.group, party.op) for party, ranks in zip(parties, joined, strict=True)]


def decided(parties: list[Party]) -> Parting:
    parties = sorted(parties, key=lambda party: (len(party.ranks), party.ranks))
    most = parties[-1]
    if 2 * len(most.ranks) > sum(len(party.ranks) for party in parties):
        return Parting(
            tuple(parties),
            _ranks(parties[:-1]),
            f"{ranks_text(most.ranks)} did the same, {ranks_text(_ranks(parties[:-1]))} did not",
        )
    usual = [party for party in parties if party.op is not None and party.op.usual]
    unusual = [party for party in parties if party.op is not None and party.op.usual is False]
    unknown = [party for party in parties if party.op is None]
    left = unknown if usual and len(usual) + len(unknown) == len(parties) else []
    if unusual and (usual or unknown):
        left = unusual
    if left and len(left) < len(parties):
        stayed = [party for party in parties if party not in left]
        how = (
            f"the operations before repeat themselves, and what {ranks_text(_ranks(left))} entered never came next in"
            " them"
        )
        return Parting((*left, *stayed), _ranks(left), how)
    parties.sort(key=lambda party: party.ranks)
    return Parting(
        tuple(parties), (), "as many ranks did one as the other, and nothing before shows which is the usual one"
    )


def _ranks(parties: Iterable[Party]) -> tuple[int, ...]:
    return tuple(sorted(rank for party in parties for rank in party.ranks))
