"""rollouts.jsonl: written, bounded, resumed, and shown by `stoker rollouts`. Without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stoker.cli import rollouts as command
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.control.record.rollouts_log import ENDS, STEPS_PER_LIMIT, Rollout, RolloutsWriter, read_rollouts, summarize


def rollout(step: int, row: int = 0, answer: str = "x", reward: float = 0.5, prompt: object = "?") -> Rollout:
    return Rollout(step, step, row, prompt, answer, reward, {"exact": reward, "length": 0.1}, reward > 0.5, 3, False)


def test_what_is_written_is_read_again_and_a_torn_line_is_not(tmp_path: Path) -> None:
    file = RolloutsWriter(str(tmp_path), 0, 1 << 20)
    told = [rollout(step, row, f"é{step}\n", step / 10) for step in range(4) for row in range(2)]
    for step in range(4):
        file.write([one for one in told if one.step == step])
    file.close()
    path = tmp_path / "rollouts.jsonl"
    assert list(read_rollouts(str(tmp_path))) == told and path.stat().st_mode & 0o077 == 0
    whole = path.read_text()
    path.write_text(whole[:-20] + "\n[1]\n{}\nnull\n\xff\n")
    assert list(read_rollouts(str(tmp_path))) == told[:-1]
    path.write_text(whole[:-20])
    RolloutsWriter(str(tmp_path), 3, 1 << 20).close()  # resumed at step 3
    assert list(read_rollouts(str(tmp_path))) == told[:6], "a step that is made again is not there twice"


def test_the_file_is_bounded_and_keeps_both_ends(tmp_path: Path) -> None:
    limit = 40_000
    file = RolloutsWriter(str(tmp_path), 0, limit)
    largest = 0
    for step in range(300):
        file.write(rollout(step, row, "y" * 200) for row in range(3))
        largest = max(largest, (tmp_path / "rollouts.jsonl").stat().st_size)
    kept = sorted({one.step for one in read_rollouts(str(tmp_path))})
    assert largest <= limit and kept[:ENDS] == list(range(ENDS)) and kept[-ENDS:] == list(range(295, 300))
    assert any(50 < step < 250 for step in kept), "the middle is thinner, not gone"
    file.write(rollout(300, row, "z" * 200) for row in range(1000))
    file.close()
    last = [one for one in read_rollouts(str(tmp_path)) if one.step == 300]
    assert 3 < len(last) < 1000 and sum(len(one.answer) for one in last) < limit // STEPS_PER_LIMIT


def test_best_worst_and_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = RolloutsWriter(str(tmp_path), 0, 1 << 20)
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyz01234567"
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Colour?"}]
    for step in range(12):
        up, down = step / 12, 1 - step / 12
        file.write([rollout(step, 0, f"up {step}", up, "1 + 1?"), rollout(step, 0, f"up {step}", up, "1 + 1?"),
                    rollout(step, 1, f"\x1b[31mdown\nline {secret}", down, messages)])  # fmt: skip
    file.close()
    assert command.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "36 completions of 12 steps, 0 to 11" in out and secret not in out and "\x1b" not in out, out
    best, rest = out.partition("Worst:")[0], out.partition("Worst:")[2]
    assert (
        best.count("completion: up 11") == 1
        and "0.917 (exact 0.916667, length 0.1)  step 11, 3 tokens, correct" in best
    )
    assert (
        "+0.917  prompt: 1 + 1?" in rest
        and "step 0, mean reward 0.000: up 0" in rest
        and "-0.917  prompt: Colour?" in rest
    )
    assert command.main([str(tmp_path), "--json", "--most", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == [0, 11, 12] and [one["gain"] for one in told["changed"]] == pytest.approx(
        [11 / 12, -11 / 12]
    )
    assert command.main([str(tmp_path), "--step", "3"]) == 0
    assert "No prompt occurs in two of these steps, so there is no change to show." in capsys.readouterr().out


def test_a_file_without_grades_marks_only_what_its_stricter_rule_knew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"step": 0, "weights": 0, "row": row, "prompt": "Which?", "answer": f"{row}", "reward": float(row), "tokens": 1,
         "parts": {}, "right": right, "cut": False}
        for row, right in enumerate((False, True, None))
    ]  # fmt: skip
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [one.correct for one in read_rollouts(str(tmp_path))] == [None, True, None]
    assert command.main([str(tmp_path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {one["answer"]: one["correct"] for one in best} == {"0": None, "1": True, "2": None}
    assert command.main([str(tmp_path)]) == 0
    assert "wrong\n" not in capsys.readouterr().out, "an answer that may be correct is not called wrong"


def test_no_file_no_answers_and_no_regular_file_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as problem:
        next(read_rollouts(str(tmp_path)))
    assert problem.value.code == EX_NOINPUT and "stage grpo writes it" in problem.value.line
    (tmp_path / "rollouts.jsonl").write_text("")
    with pytest.raises(Refusal, match="has no completions yet"):
        command.main([str(tmp_path)])
    (tmp_path / "rollouts.jsonl").unlink()
    os.mkfifo(tmp_path / "rollouts.jsonl")
    with pytest.raises(Refusal, match="is a named pipe") as problem:
        list(read_rollouts(str(tmp_path)))
    assert problem.value.code == EX_NOINPUT and summarize([]).changes == ()
