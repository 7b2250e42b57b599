"""Secrets behind escapes, others' measurements, and small files that took minutes or ended in a traceback."""

from __future__ import annotations

import json

from conftest import Stoker
from security.shapes import body_of


def test_a_message_that_is_cut_within_a_token_keeps_no_part_of_it(stoker: Stoker) -> None:
    token = "hf_" + 2 * body_of("cut")
    script = f"token = {token!r}[:-1] + 'w'\nraise ValueError('x ' * 9994 + token)"  # 20,000 characters are kept
    failed = stoker("run", "--show", "none", stoker.script("fails.py", script))
    report = json.loads((failed.run_dir / "attempt-0" / "rank-0.error.json").read_text())
    assert "hf_" not in report["message"] and report["message"].startswith("x x")
