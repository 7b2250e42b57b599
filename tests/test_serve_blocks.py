"""The paged cache's bookkeeping and the schedule, without torch: nothing leaks, nothing is used twice, everybody is answered."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from conftest import at_length
from stoker.training.serve.blocks import Chain, Pool, Table
from stoker.training.serve.schedule import PATIENCE, Plan, Schedule, Writing
from stoker.training.serve.text import Text

SEEDS = [range(8), pytest.param(range(8, 400), marks=at_length)]


class Memory:
    """Stands in for keys and values: each place has the tokens before it, which is what its keys depend on."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.kept = pool, [[()] * pool.size for _ in range(pool.count)]

    def read(self, blocks: Sequence[int], end: int) -> list[tuple[int, ...]]:
        size = self.pool.size
        return [self.kept[blocks[place // size]][place % size] for place in range(end)]

    def carry_out(self, plan: Plan, schedule: Schedule) -> None:
        contents = {copy.target: list(self.kept[copy.source]) for copy in plan.copies}
        assert len(contents) == len(plan.copies), "a block is copied to twice"
        for target, content in contents.items():
            self.kept[target] = content
        spans = [(piece.writing, piece.begin, piece.end) for piece in plan.pieces]
        spans += [(writing, len(writing.tokens) - 1, len(writing.tokens)) for writing in plan.rows]
        for writing, begin, end in spans:
            assert writing.table is not None and writing.computed == begin < end
            for place in range(begin, end):
                block = writing.table.blocks[place // self.pool.size]
                self.kept[block][place % self.pool.size] = tuple(writing.tokens[: place + 1])
        for writing, _, end in spans:  # after all have written: nobody wrote over another's
            assert writing.table is not None
            want = [tuple(writing.tokens[: place + 1]) for place in range(end)]
            assert self.read(writing.table.blocks, end) == want
        schedule.computed(plan)

    def check(self, schedule: Schedule) -> None:
        tables = [writing.table for writing in schedule.running]
        assert all(table is not None for table in tables)
        assert not list(self.pool.problems([table for table in tables if table is not None]))


def prompt_of(draw: random.Random) -> list[int]:
    """Few tokens, and beginnings that many share: of whole blocks, and within one."""
    beginning = [[], [1] * 9, [1] * 9 + [2] * 5, [3, 1, 2]][draw.randrange(4)]
    return beginning + [draw.randrange(2) for _ in range(draw.randint(1, 6))]


@pytest.mark.parametrize("seeds", SEEDS)
def test_random_requests_are_all_answered_from_their_own_tokens(seeds: range) -> None:
    for seed in seeds:
        answered_at_random(seed)


def answered_at_random(seed: int) -> None:
    draw = random.Random(seed)
    size, longest = draw.choice([1, 2, 4, 8]), 40
    pool = Pool(-(-longest // size) + draw.randrange(12), size)
    schedule = Schedule(draw.choice([1, 2, 3, 4, 5, 6, 40]), pool, draw.choice([1, 3, 16, 100]))
    memory = Memory(pool)
    wanted: dict[Writing, int] = {}
    to_come, steps = 60, 0
    while to_come or wanted:
        while to_come and draw.random() < 0.4:
            prompt = prompt_of(draw)
            wanted[schedule.add(prompt)] = draw.randint(1, longest - len(prompt))
            to_come -= 1
        if wanted and draw.random() < 0.05:
            gone = draw.choice(list(wanted))
            schedule.end(gone)
            del wanted[gone]
        if draw.random() < 0.01:
            schedule.restart(f"version {steps}")
        plan = schedule.plan()
        assert len({id(one) for one in [*plan.rows, *(piece.writing for piece in plan.pieces)]}) == len(
            plan.rows
        ) + len(plan.pieces)
        assert not plan.is_empty or plan.left_out or not wanted, "nothing goes on"
        memory.carry_out(plan, schedule)
        memory.check(schedule)
        for writing in [*plan.rows, *(piece.writing for piece in plan.pieces if piece.is_last)]:
            writing.tokens.append(draw.randrange(2))
            if len(writing.tokens) - writing.prompt == wanted[writing]:
                schedule.end(writing)
                del wanted[writing]
        steps += 1
        assert steps < 60 * longest * 4, "somebody waits for ever"
    assert not schedule.running and not schedule.waiting and pool.held == 0
    memory.check(schedule)
    pool.forget()
    assert not list(pool.problems([])) and pool.available == pool.count


@pytest.mark.parametrize("seed", range(3))
def test_blocks_have_one_holder_more_with_each_that_shares_them(seed: int) -> None:
    """Tables that begin with another's blocks, grow, and are released, at random."""
    draw, pool = random.Random(seed), Pool(12, 3)
    tables: list[tuple[Table, int]] = []
    for turn in range(600):
        action = draw.randrange(4)
        if action == 0:
            shared = draw.choice(tables)[0].blocks[: draw.randrange(4)] if tables else []
            tokens = 3 * len(shared) + draw.randint(1, 9)
            before = pool.available
            made = pool.opened(shared, tokens, spare=draw.randrange(2))
            assert made is not None or pool.available == before
            tables += [] if made is None else [(made, tokens)]
        elif tables and action == 1:
            table, tokens = tables.pop(draw.randrange(len(tables)))
            begin = draw.randrange(tokens)
            grown = pool.grow(table, begin, tokens + 2)
            others = {block for other, _ in tables for block in other.blocks}
            assert grown is None or not others & set(table.blocks[begin // 3 :]), "what it writes to is its own"
            tables.append((table, tokens if grown is None else tokens + 2))
        elif tables and action == 2:
            table, tokens = draw.choice(tables)
            pool.name(table, b"%d" % turn, draw.randint(1, tokens))
        elif tables:
            pool.release(tables.pop(draw.randrange(len(tables)))[0])
        assert not list(pool.problems([table for table, _ in tables]))
    for table, _ in tables:
        pool.release(table)
    assert pool.held == 0 and not list(pool.problems([]))


def run(schedule: Schedule, memory: Memory, steps: int = 1, token: int = 7) -> Plan:
    for _ in range(steps):
        plan = schedule.plan()
        memory.carry_out(plan, schedule)
        memory.check(schedule)
        for writing in [*plan.rows, *(piece.writing for piece in plan.pieces if piece.is_last)]:
            writing.tokens.append(token)
    return plan


def test_a_prompt_asked_several_times_is_computed_once() -> None:
    for length in (3, 4, 10, 12):  # within a block, one block, between, at a block's end
        pool = Pool(40, 4)
        schedule, memory = Schedule(8, pool, 100), Memory(pool)
        group = [schedule.add(range(length)) for _ in range(5)]
        assert [piece.writing for piece in run(schedule, memory).pieces] == group[:1], "the others wait for it"
        plan = run(schedule, memory)
        assert set(plan.rows) == set(group) and not plan.pieces, "one token each: the last, computed again"
        assert schedule.prompt_tokens == length + 4
        run(schedule, memory, 3)
        assert len({tuple(writing.tokens) for writing in group[1:]}) == 1
        shared = (length - 1) // 4
        assert pool.held == 4 * pool.needed(length + 3) + pool.needed(length + 4) - 4 * shared, (
            "those are held together"
        )


def test_a_whole_prompt_is_still_known_when_all_its_users_have_gone_and_another_took_it_up() -> None:
    pool = Pool(40, 4)
    schedule, memory = Schedule(8, pool, 100), Memory(pool)
    first = schedule.add([5] * 6)
    run(schedule, memory)
    schedule.end(first)
    group = [schedule.add([5] * 6) for _ in range(5)]
    plan = run(schedule, memory)
    assert set(plan.rows) == set(group) and not plan.pieces, "its last token is computed again, and nothing else"


def test_a_beginning_is_still_known_when_its_first_user_has_gone() -> None:
    pool = Pool(10, 4)
    schedule, memory = Schedule(2, pool, 100), Memory(pool)
    first = schedule.add([5] * 9)
    run(schedule, memory, 2)
    schedule.end(first)
    assert pool.held == 0
    second = schedule.add([5] * 8 + [6, 6])
    (piece,) = run(schedule, memory).pieces
    assert (piece.writing, piece.begin, piece.end) == (second, 8, 10)
    schedule.restart("new weights")
    (piece,) = run(schedule, memory).pieces
    assert piece.begin == 0, "what other weights computed is no use"
    schedule.end(second)
    large = schedule.add(range(38))
    run(schedule, memory)
    assert large.slot >= 0 and pool.held == 10, "kept blocks give way"


def test_a_kept_block_that_is_written_over_is_no_longer_known_by_what_it_had() -> None:
    """A prompt of half a block, whose block was kept full: the next answer to that prompt writes its other half anew."""
    pool = Pool(10, 4)
    schedule, memory = Schedule(2, pool, 100), Memory(pool)
    first = schedule.add([1, 2])
    run(schedule, memory, 4)
    schedule.end(first)
    other = schedule.add([1, 2])
    run(schedule, memory, 4, token=8)
    assert other.tokens == [1, 2, 8, 8, 8, 8] and schedule.shared_tokens == 1
    schedule.end(other)
    third = schedule.add([1, 2, 7, 7, 9])
    run(schedule, memory)
    assert third.tokens == [1, 2, 7, 7, 9, 7] and schedule.shared_tokens == 1


def test_the_youngest_gives_way_and_the_oldest_goes_on() -> None:
    pool = Pool(6, 2)
    schedule, memory = Schedule(3, pool, 100), Memory(pool)
    old, young = schedule.add([1, 2]), schedule.add([3, 4])
    run(schedule, memory, 4)
    assert old.slot >= 0 and young.slot >= 0
    left_out = [run(schedule, memory).left_out for _ in range(4)]
    assert [young] in [list(one) for one in left_out] and not any(old in one for one in left_out)
    later = schedule.add([9])
    assert schedule.waiting == [young, later], "it comes back before those who came later"
    schedule.end(old)
    before = list(young.tokens)
    run(schedule, memory)
    assert young.slot >= 0 and young.tokens[: len(before)] == before


def test_a_large_prompt_is_not_overtaken_for_ever_and_does_not_stop_others() -> None:
    pool = Pool(12, 4)
    schedule, memory = Schedule(4, pool, 8), Memory(pool)
    small = schedule.add([1])
    run(schedule, memory)
    large, behind = schedule.add(range(50, 94)), schedule.add([2])
    run(schedule, memory, 3)
    assert large.slot < 0 and behind.slot < 0, "11 blocks are not there yet, and nobody takes what is"
    schedule.end(small)
    plans = [run(schedule, memory) for _ in range(6)]
    assert [piece.end - piece.begin for plan in plans for piece in plan.pieces] == [8, 8, 8, 8, 8, 4]


def test_while_nearly_all_slots_are_taken_prompts_begin_in_groups() -> None:
    pool = Pool(2000, 4)
    schedule, memory = Schedule(64, pool, 1000), Memory(pool)
    writings = [schedule.add([5, number]) for number in range(100)]
    assert len(run(schedule, memory).pieces) == 64, "an idle engine takes all it can at once"
    for writing in writings[:3]:
        schedule.end(writing)
    assert not any(run(schedule, memory).pieces for _ in range(PATIENCE - 1)), "three free slots wait for a fourth"
    assert len(run(schedule, memory).pieces) == 3, "but not for ever"
    for writing in writings[3:7]:
        schedule.end(writing)
    assert len(run(schedule, memory).pieces) == 4
    for writing in schedule.waiting[1:]:
        schedule.end(writing)
    schedule.end(writings[7])
    assert len(run(schedule, memory).pieces) == 1, "nobody else wants a slot"


def test_the_bookkeeping_is_free_of_torch() -> None:
    code = "import sys; from stoker.training.serve import request, schedule, text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_keys_depend_on_all_tokens_before_and_on_the_root() -> None:
    one, other = Chain(2), Chain(2)
    assert one.full([1, 2, 3, 4, 5], 5) == other.full([1, 2, 3, 4], 4)
    assert one.last([1, 2, 3, 4, 5], 5) not in one.full([1, 2, 3, 4, 5], 5)
    assert Chain(2).full([9, 2, 3, 4], 4)[1] != one.full([1, 2, 3, 4], 4)[1]
    assert Chain(2, "1").full([1, 2], 2) != one.full([1, 2], 2)


def test_a_stop_text_is_found_wherever_tokens_are_parted() -> None:
    draw = random.Random(4)
    whole = "xaab→é the end aabac".encode()
    for stops, want in (
        (("aabac",), "xaab→é the end "), (("é t", "the"), "xaab→"), (("nothing",), "xaab→é the end aabac"),
        (("b→é the e", "→"), "xaab"), (("aab", "ab"), "x"), (("",), "xaab→é the end aabac"), ((), "xaab→é the end aabac"),
    ):  # fmt: skip
        for _ in range(30):
            cuts = sorted(draw.sample(range(1, len(whole)), draw.randrange(len(whole))))
            tokens = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
            text, shown = Text(tokens.__getitem__, stops), ""
            for number in range(len(tokens)):
                shown += text.feed(number)
                assert want.startswith(shown), "nothing is taken back"
                if text.stopped:
                    break
            assert shown + text.rest() == want and text.stopped == (want != whole.decode())


def test_hidden_tokens_have_no_text_and_half_a_character_is_shown_at_the_end() -> None:
    pieces = [b" a", b"<mark>", b"\xe2\x86", b"\x92", b"\xe2"]
    text = Text(pieces.__getitem__, hidden={1}, strips=True)
    assert [text.feed(number) for number in range(5)] == ["a", "", "", "→", ""] and text.rest() == "�"
