"""A plan is a list of roles: ranks are numbered within theirs, and each has its own command, world, environment and restarts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import stoker as package
from conftest import Stoker
from stoker.contract.shapes import RankEnd, Verdict
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.options import RunOptions
from stoker.control.launch.plan import Place, Role, RunPlan, Towards, common_environment, start_order
from stoker.control.launch.restarts import Restarts
from stoker.control.launch.runplace import RunPlace

TRAIN = Role("train", ("python", "train.py"), 2, True, 1, {"PART": "train"})
SERVE = Role("serve", ("serve", "--port", "0"), 1, False, 0, {"PART": "serve"})
PLACES = tuple(
    Place(rank, rank, 3, 0, "", None, f"CPU{rank}", role, of_role)
    for rank, (role, of_role) in enumerate([("train", 0), ("train", 1), ("serve", 0)])
)
PLAN = RunPlan(PLACES, (TRAIN, SERVE), ("",), False, False, {"": 3}, (), {"": None})


def test_each_rank_has_the_number_the_world_and_the_command_of_its_role() -> None:
    options, place = RunOptions(), RunPlace("/runs/x", "x", "x", 0, False)
    common = {role.name: common_environment(PLAN, role, options, {}, place, 4) for role in PLAN.roles}
    order = start_order(PLAN, options, 0, Towards(workdir="/w"), {}, common, {"MASTER_PORT": "1"})
    told = [
        {**order["common"], **spec, "env": {**order["common"]["env"], **spec["env"]}} for spec in order["ranks"]
    ]  # as an agent joins them
    keys = ("RANK", "WORLD_SIZE", "ROLE_NAME", "PART", "MASTER_PORT")
    assert [tuple(one["env"][key] for key in keys) for one in told] == [
        ("0", "2", "train", "train", "1"),
        ("1", "2", "train", "train", "1"),
        ("0", "1", "serve", "serve", "1"),
    ]
    assert [(one["rank"], one["role"], one["role_rank"], one["argv"][0], one["shim"]) for one in told] == [
        (0, "train", 0, "python", True),
        (1, "train", 1, "python", True),
        (2, "serve", 0, "serve", False),
    ]
    assert PLAN.world_size == 3


def test_a_failure_costs_a_restart_of_the_role_it_came_from() -> None:
    restarts, attempt = Restarts(RunOptions()), Attempt(0, PLAN)
    for rank in range(3):
        attempt.ends[rank] = RankEnd(rank, "", f"CPU{rank}", 7, 1, 0.0)

    def failure(rank: int) -> Verdict:
        return Verdict("failed", "rank.killed", "killed", 1, rank=rank, retryable=True)

    assert restarts.decide(failure(2), attempt, 100.0)[1] is None, "serve is never started again"
    again = restarts.decide(failure(1), attempt, 100.0)[1]
    assert again is not None and "(1 of 1)" in again.line
    assert restarts.decide(failure(0), attempt, 100.0)[1] is None


def test_a_plain_job_is_one_role_and_its_record_says_so(stoker: Stoker) -> None:
    script = stoker.script("r.py", "import os; print(os.environ['ROLE_NAME'], os.environ['RANK'], os.environ['A'])")
    done = stoker("run", "--nproc-per-node", "2", "--role", "worker", "--env", "A=1", script)
    assert done.code == 0 and {b"worker 0 1\n", b"worker 1 1\n"} == {done.log(0), done.log(1)}
    plan = json.loads((done.run_dir / "run.json").read_text())["plan"]
    assert [(role["name"], role["world_size"]) for role in plan["roles"]] == [("worker", 2)]
    assert plan["argv"] == plan["roles"][0]["argv"]
    assert [(rank["rank"], rank["role"], rank["role_rank"]) for rank in plan["ranks"]] == [
        (0, "worker", 0),
        (1, "worker", 1),
    ]


def test_a_plan_shows_no_secret_of_its_roles(stoker: Stoker) -> None:
    script = stoker.script("r.py", "")
    done = stoker(
        "run", "--dry-run", "--json", "--env", "API_TOKEN=sk-7f3a9b2c4d5e6f70", script, "--api-key", "q8w7e6r5t4y3"
    )
    assert done.code == 0 and "sk-7f3a9b2c4d5e6f70" not in done.out and "q8w7e6r5t4y3" not in done.out
    plan = cast("dict[str, Any]", json.loads(done.out))
    assert plan["roles"][0]["env"].keys() == {"API_TOKEN"} and plan["argv"] == plan["roles"][0]["argv"]


def test_the_page_about_launching_names_what_is_there() -> None:
    root = Path(package.__file__).parent
    page = (root.parents[1] / "docs" / "launching.md").read_text()
    named = re.findall(r"`((?:launch|control|contract|cli)/[\w/]+\.py)(?::([\w.]+))?`", page)
    assert len(named) > 20
    for path, name in named:
        text = (root / (f"control/{path}" if path.startswith("launch/") else path)).read_text()
        for part in name.split(".") if name else ():
            assert re.search(rf"^\s*(class|def) {part}\b", text, re.MULTILINE), f"{path}: no {part}"
