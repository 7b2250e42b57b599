"""What deploy/ and .github/ hold: an image for pods, a job script for Slurm, workflows, issue forms."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import Stoker, at_length, wait_for
from slurmcluster import SlurmCluster

ROOT = Path(__file__).parents[1]
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "deploy/Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_images_instructions_hold() -> None:
    found = instructions()
    assert [name for name, _ in found] == ["ARG", "FROM", "RUN", "COPY", "RUN", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"]
    base = found[0][1].partition("=")[2]
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base), "a base with a version"
    for name, rest in found:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))
    (installs,) = [rest for name, rest in found if name == "RUN" and "apt-get install" in rest]
    assert {"git", "openssh-server", "tini", "util-linux"} <= set(shlex.split(installs)), "util-linux: setup.sh's flock"
    (_, home) = dict(found)["COPY"].split()
    for path in re.findall(rf"{home}/([\w.-]+)", " ".join(rest for name, rest in found if name == "RUN")):
        assert path == ".venv" or (ROOT / path).exists(), f"the image has no {path}"
    assert dict(found)["ENV"].split()[0] == f"PATH={home}/.venv/bin:$PATH"


def test_what_an_image_leaves_out_is_what_git_ignores() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = set((ROOT / "deploy/Dockerfile.dockerignore").read_text().split())
    assert ignored - {"__pycache__", "*.egg-info"} <= left_out


def test_the_job_script_runs_on_two_nodes(stoker: Stoker, slurm: SlurmCluster) -> None:
    stoker.script("train.py", "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    command = stoker.cwd / "stoker"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stoker "$@"\n')
    command.chmod(0o755)
    env = stoker.environment(slurm.env)
    env["PATH"] = f"{stoker.cwd}:{env['PATH']}"
    words = ["sbatch", "--parsable", "--time=5", str(ROOT / "deploy/train.sbatch"), "train.py"]
    job = subprocess.run(words, cwd=stoker.cwd, env=env, capture_output=True, text=True, check=False)
    assert job.returncode == 0, job.stderr
    number = job.stdout.strip()
    printed = stoker.cwd / f"slurm-{number}.out"
    assert wait_for(lambda: slurm.state(number) in ("COMPLETED", "FAILED", "TIMEOUT") or None, 90), slurm.state(number)
    lines = printed.read_text()
    assert "node1/CPU0:rank 0 of 2" in lines and "node2/CPU0:rank 1 of 2" in lines, lines


def test_workflows_pin_their_actions_and_run_what_exists() -> None:
    steps = [step for job in CI["jobs"].values() for step in job["steps"]]
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"]), step["uses"]
        elif step["run"].startswith("bash "):
            assert (ROOT / step["run"].split()[1]).exists()
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


@at_length
@pytest.mark.parametrize("job", ["lint", "wheel", "docs"])
def test_the_steps_of_a_workflow_run_in_a_fresh_clone(job: str, tmp_path: Path) -> None:
    """As a runner has them, one after the other in one folder, with a Python that has no packages. `test` is test.sh itself."""
    clone, bare = tmp_path / "clone", tmp_path / "python"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(bare)], check=True)
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env |= {"PATH": f"{bare}/bin:{env['PATH']}", "PYTHON": str(Path(sys.executable).resolve())}
    for step in CI["jobs"][job]["steps"]:
        if "run" in step:
            told = step["run"].replace("/tmp/", f"{tmp_path}/").replace("cd /tmp\n", f"cd {tmp_path}\n")
            done = subprocess.run(
                ["bash", "-e", "-c", told], cwd=clone, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (told, done.stdout[-2000:] + done.stderr[-2000:])


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_an_issue_form_is_one(name: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"] and form["description"]
    assert {part["type"] for part in form["body"]} <= {"textarea", "input", "dropdown", "checkboxes", "markdown"}
    labels = " ".join(part["attributes"]["label"] for part in form["body"])
    if name == "bug":
        assert "stoker doctor --bundle" in labels and "stoker why --json" in labels


def test_hooks_have_the_versions_of_the_known_good_set() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [repo["rev"] for repo in hooks if repo["repo"].endswith("ruff-pre-commit")]
    assert ruff == f"v{pinned['ruff']}"
