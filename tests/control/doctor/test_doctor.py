"""The doctor: every recorded machine gives exactly its findings; a healthy one none; a driver that hangs hangs nobody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from conftest import Stoker, wait_for
from stoker.cli.doctor import recommend_next_step
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.control.doctor import check, check_docs
from stoker.control.machine import examine
from stoker.control.machine.examination import Examination, examination_from_json

MACHINES = Path(__file__).parents[2] / "machines"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))
HEALTHY = {"laptop", "box8-healthy", "half-unsupported", "h200"}


def load(name: str) -> Examination:
    return examination_from_json(json.loads((MACHINES / f"{name}.json").read_text()))


def report(name: str) -> str:
    found = load(name)
    findings = check.run_checks(check.choose_checks([], []), found)
    lines = [
        f"{one.level} {one.id}"
        + (f" [GPU {one.gpu}]" if one.gpu is not None else "")
        + f": {one.text}\n    -> {one.fix}"
        for one in findings
    ]
    return (
        "\n".join(
            [*lines, f"advice: {recommend_next_step(found, findings)}", f"exit code: {check.exit_code(findings)}"]
        )
        + "\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_gives_exactly_its_findings(name: str) -> None:
    assert report(name) == (MACHINES / f"{name}.findings").read_text()


@pytest.mark.parametrize("name", sorted(HEALTHY & set(NAMES)))
def test_a_healthy_machine_gives_none(name: str) -> None:
    assert check.run_checks(check.choose_checks([], []), load(name)) == []


def test_there_are_machines_enough_and_every_check_has_spoken() -> None:
    assert len(NAMES) >= 12
    said = {
        finding.id
        for name in NAMES
        for finding in check.run_checks(check.choose_checks([], []), load(name))
        if finding.level != "unknown"
    }
    silent = set(check.load_checks()) - said
    assert silent == {"host.swap", "host.clock", "env.python"}, "these have their own tests below"


def test_the_three_without_a_machine() -> None:
    sick = load("laptop")
    assert sick.host is not None
    swapping = replace(
        sick, machine=replace(sick.machine, memory_available=10**9), host=replace(sick.host, swap_used=9 * 10**9)
    )
    old = replace(sick, host=replace(sick.host, clock=1.0))
    env = replace(sick, environment={"PYTHONHOME": "/x"})
    for found, id in ((swapping, "host.swap"), (old, "host.clock"), (env, "env.python")):
        assert id in {finding.id for finding in check.run_checks(check.choose_checks([id], []), found)}


def test_what_is_said_elsewhere_or_harms_nobody() -> None:
    found = load("box8-healthy")
    assert found.host is not None
    for limit, level in ((10**12, None), (200 * 10**9, "warn"), (30 * 10**9, "fail")):
        one = replace(found, host=replace(found.host, address_space=limit))
        assert (
            next(
                (
                    finding.level
                    for finding in check.run_checks(check.choose_checks([], []), one)
                    if finding.id == "host.address-space"
                ),
                None,
            )
            == level
        )
    hung = replace(
        found,
        machine=replace(found.machine, gpus=(), gpu_error="no answer in 3 s"),
        environment={"CUDA_VISIBLE_DEVICES": "0,1"},
    )
    findings = check.run_checks(check.choose_checks([], []), hung)
    assert "gpu.count" not in {
        finding.id for finding in findings
    } and "driver is not responding" in recommend_next_step(hung, findings)


def test_asking_for_too_much() -> None:
    findings = check.run_checks(check.choose_checks(["gpu.count"], []), load("box8-healthy"), 9)
    assert [finding.level for finding in findings] == ["fail"] and "9 ranks" in findings[0].text


def test_only_and_skip_and_the_near_id() -> None:
    assert {one.id for one in check.choose_checks(["env."], ["env.slow"])} == {
        id for id in check.load_checks() if id.startswith("env.")
    } - {"env.slow"}
    with pytest.raises(Refusal, match=r"no check 'gpu.ecccc' \(did you mean gpu.ecc\?\)"):
        check.choose_checks(["gpu.ecccc"], [])


def test_the_docs_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "doctor.md"
    assert page.read_text() == check_docs.page(), "run: python -m stoker.control.doctor.check_docs > docs/doctor.md"


def test_the_order_is_that_of_the_files_whichever_was_imported_first() -> None:
    script = "import stoker.control.doctor.checks.torch; from stoker.control.doctor import check; print(*check.load_checks())"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert shown == list(check.load_checks())
    assert [id.partition(".")[0] for id in shown] == sorted(id.partition(".")[0] for id in shown)


def test_this_machine(stoker: Stoker) -> None:
    """The real thing, whatever this machine is: it answers, as JSON and as text, and agrees with itself."""
    stoker.env.pop("STOKER_MACHINE")
    done = stoker("doctor", "--json", "--skip", "torch.")
    told = json.loads(done.out)
    assert told["schema"] == 1 and done.code == told["exit_code"] in (0, 1, 2, 3)
    assert (
        isinstance(told["examination"]["machine"]["memory_total"], int)
        and told["examination"]["machine"]["hostname"] == os.uname().nodename
    )
    assert set(told["checks"]) == {id for id in check.load_checks() if not id.startswith("torch.")}
    assert re.search(r" GiB memory free; torch not checked\n", stoker("doctor", "--only", "env.").out)


def test_record_replay_and_bundle(stoker: Stoker) -> None:
    stoker.env.pop("STOKER_MACHINE")
    done = stoker(
        "doctor",
        "--record",
        "box.json",
        "--bundle",
        "b.tar.gz",
        env={"HF_TOKEN": "hf_abcdefghijklmnopqrstuvw", "NCCL_DEBUG": "INFO"},
    )
    assert "env.noisy" in done.out
    again = stoker("doctor", "--machine", "box.json")
    kept = [line for line in done.out.splitlines() if not line.startswith(("bundle:", "recorded machine:"))]
    assert again.out.splitlines() == kept and again.code == done.code
    with tarfile.open(stoker.cwd / "b.tar.gz") as archive:
        names = archive.getnames()
        whole = b"".join(archive.extractfile(name).read() for name in names)  # type: ignore[union-attr]
    assert (
        "stoker-doctor/examination.json" in names
        and "stoker-doctor/findings.json" in names
        and b"hf_abcdef" not in whole
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--machine", "absent.json"], 66, "absent.json does not exist"),
        (["--machine", "corrupt.json"], 65, "corrupt.json"),
        (["--machine", "other.json"], 65, "unknown field 'colour'"),
        (["--only", "gpo."], 64, "did you mean gpu."),
        (["--bundle", "/proc/nope.tar.gz", "--only", "env."], 73, "can't be written"),
        (["--record", "/proc/nope.json", "--only", "env."], 73, "can't be written"),
    ],
)  # fmt: skip
def test_bad_words(stoker: Stoker, words: list[str], code: int, says: str) -> None:
    stoker.script("corrupt.json", '{"schema": 1, "machine"')
    stoker.script("other.json", json.dumps({**json.loads((MACHINES / "laptop.json").read_text()), "colour": 1}))
    if words[0] in ("--bundle", "--record"):
        words = [*words, "--machine", str(MACHINES / "laptop.json")]
    done = stoker("doctor", *words)
    assert done.code == code and says in done.err and done.err.count("\n") == 1


def test_a_driver_that_never_answers(stoker: Stoker) -> None:
    """A libnvidia-ml that hangs in nvmlInit: the doctor says so and goes on. Compiled here, because only a real library can hang so."""
    source = stoker.cwd / "hang.c"
    source.write_text(
        "#include <unistd.h>\nint nvmlInitWithFlags(unsigned f) { for (;;) sleep(100); }\nint nvmlInit_v2(void) { for (;;) sleep(100); }\n"
    )
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(stoker.cwd / "libnvidia-ml.so.1"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"no C compiler to build a hanging library: {built.stderr.strip()[:100]}")
    env = {**stoker.env, "LD_LIBRARY_PATH": str(stoker.cwd)}
    env.pop("STOKER_MACHINE")
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "doctor", "--skip", "torch."],
        cwd=stoker.cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 3, done.stdout
    assert "? gpu.driver: the NVIDIA driver could not be queried: no answer within 3 s" in done.stdout
    assert wait_for(lambda: True if not _children_of(str(stoker.cwd)) else None, 5), "a gatherer was left behind"


def _children_of(folder: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if (
                    folder in os.readlink(f"/proc/{entry}/cwd")
                    and b"machine.examine_child" in Path(f"/proc/{entry}/cmdline").read_bytes()
                ):
                    found.append(int(entry))
            except OSError:
                continue
    return found


SILENT_SERVER = """
import pathlib, socket, subprocess, sys
folder = pathlib.Path(sys.argv[1])
for name, text in (("hosts", "127.0.0.1 localhost"), ("resolv.conf", "nameserver 127.0.0.9")):
    (folder / name).write_text(text)
    subprocess.run(["mount", "--bind", str(folder / name), f"/etc/{name}"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
socket.sethostname("lonely")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("127.0.0.9", 53))  # it hears all questions and answers none
    sys.exit(subprocess.run(sys.argv[2:], check=False).returncode)
"""


def test_a_name_server_that_does_not_answer_is_named(stoker: Stoker, tmp_path: Path) -> None:
    command = ["unshare", "--mount", "--net", "--uts", sys.executable, "-c", SILENT_SERVER, str(tmp_path)]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    if tried.returncode:
        pytest.skip(f"no network namespace can be made here: {tried.stderr[-200:]}")
    words = [sys.executable, "-m", "stoker", "doctor", "--only", "net", "--json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=stoker.env)
    findings = json.loads(done.stdout)["findings"]
    assert [(one["id"], one["level"]) for one in findings] == [("net.lookups", "warn")], done.stdout
    assert "the name server 127.0.0.9 does not respond" in findings[0]["text"] and "/etc/hosts" in findings[0]["fix"]


def test_watch_prints_what_changes(stoker: Stoker) -> None:
    run = stoker.start("doctor", "--machine", str(MACHINES / "bad-environment.json"), "--watch", "0.2s")
    assert run.stdout is not None
    lines = [run.stdout.readline().decode() for _ in range(3)]
    assert all(re.match(r"\d\d:\d\d:\d\d [✗!?] ", line) for line in lines)
    run.send_signal(2)
    assert run.wait(100) == 2


def test_an_examination_survives_json() -> None:
    for name in NAMES:
        found = load(name)
        assert examination_from_json(json.loads(json.dumps(found.to_json()))) == found


def test_gatherers_that_crash_are_told_apart_from_those_that_hang() -> None:
    quick = examine.Child("a", [sys.executable, "-c", "import sys; sys.exit('broken')"], os.environ, 5.0)
    slow = examine.Child("b", [sys.executable, "-c", "import time; time.sleep(60)"], os.environ, 0.5)
    fine = examine.Child("c", [sys.executable, "-c", "print('{\"x\": 1}')"], os.environ, 5.0)
    results = examine._wait_for_children([quick, slow, fine])
    assert results["a"][0] is None and "broken" in results["a"][1]
    assert results["b"] == (None, "no answer within 0 s") and results["c"] == ({"x": 1}, "")


if __name__ == "__main__":
    for machine in NAMES:
        (MACHINES / f"{machine}.findings").write_text(report(machine))
