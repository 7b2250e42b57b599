"""What a config file may name, and who has to own it for that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import shutil

from conftest import Stoker
from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.training.config import files, layers
from stoker.training.config.flags import parse
from stoker.training.config.keys import KEYS
from stoker.training.rl.config import names_code

SPELLINGS = {
    "section": "model:\n  load: m\n  trust_remote_code: true\n",
    "dashes": "model:\n  trust-remote-code: yes\n",
    "dotted": "model.trust_remote_code: true\n",
    "dotted, dashes": "model.trust-remote-code: 'true'\n",
    "alone": "trust_remote_code: true\n",
    "section of the notes": "training:\n  trust_remote_code: true\n",
    "JSON": '{"model": {"trust_remote_code": true}}',
}


ELSEWHERE = {
    "an address": "http://192.0.2.7:8000",
    "a name": "http://collector.example:8000/v1",
    "behind one of ours": "http://127.0.0.1:8000,http://192.0.2.7:8000",
    "ours as its user": "http://127.0.0.1:8000@192.0.2.7:8000",
    "a name that looks like ours": "http://127.0.0.1.example:8000",
    "an address of all interfaces": "http://[::]:8000",
    "no address at all": "http://[::1:8000",
}


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_only_the_users_own_config_file_lets_a_models_code_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert layers.gather(parse(["--config", str(path)]), {}).told("model.trust_remote_code")[0] is True  # type: ignore[index]
    path.chmod(0o666)  # others can write it
    with pytest.raises(Refusal, match=r"config file of your own.*--model\.trust_remote_code") as problem:
        layers.gather(parse(["--config", str(path)]), {})
    assert problem.value.code == EX_CONFIG and str(path) in problem.value.line
    given = layers.gather(parse(["--config", str(path), "--trust-remote-code"]), {})
    assert given.told("model.trust_remote_code")[0] is True  # type: ignore[index]
    environment = {"STOKER_TRAIN_MODEL_TRUST_REMOTE_CODE": "false"}
    assert layers.gather(parse(["--config", str(path)]), environment).told("model.trust_remote_code")[0] is False  # type: ignore[index]


def test_a_downloaded_or_shipped_config_file_lets_no_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = tmp_path / "models--owner--name" / "snapshots" / "abc" / "c.yaml"
    downloaded.parent.mkdir(parents=True)
    downloaded.write_text("model:\n  trust_remote_code: true\n")
    with pytest.raises(Refusal, match="downloaded from the hub"):
        layers.gather(parse(["--config", str(downloaded)]), {})
    monkeypatch.setattr(files, "_NAMED", str(downloaded.parent))
    with pytest.raises(Refusal, match="comes with Stoker"):
        layers.gather(parse(["--config", "c"]), {})


def test_what_only_an_own_file_may_set_are_keys_and_their_defaults_may_stand_in_any(tmp_path: Path) -> None:
    assert set(layers.ONLY_IN_OWN_FILE) <= set(KEYS)
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  trust_remote_code: false\n")
    path.chmod(0o666)
    assert layers.gather(parse(["--config", str(path)]), {}).told("model.trust_remote_code")[0] is False  # type: ignore[index]


@pytest.mark.parametrize("reward", ["rewards.py:score", "a=b.py:score=1", "lang=en/r.py:score=1", "r.py:score=0.5"])
def test_a_config_file_names_no_code(reward: str) -> None:
    """However a weight is cut off it."""
    assert names_code([reward]) and names_code((reward,)) and names_code(reward)
    assert not names_code(["exact", "regex:a.py=1", "length=0.1"])


@pytest.mark.parametrize("server", ELSEWHERE.values(), ids=ELSEWHERE)
def test_only_the_users_own_config_file_names_a_server_elsewhere(tmp_path: Path, server: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f'grpo:\n  server: "{server}"\n')
    assert layers.gather(parse(["--config", str(path)]), {}).told("grpo.server")[0] == server  # type: ignore[index]
    path.chmod(0o666)
    with pytest.raises(Refusal, match=r"config file of your own.*--grpo\.server") as problem:
        layers.gather(parse(["--config", str(path)]), {})
    assert problem.value.code == EX_CONFIG and str(path) in problem.value.line
    given = layers.gather(parse(["--config", str(path), "--grpo.server", server]), {})
    assert given.told("grpo.server")[0] == server  # type: ignore[index]


@pytest.mark.parametrize(
    "server", ["", "server", "http://localhost:8000", "http://127.0.0.1:8000,http://[::1]:8001/v1"]
)
def test_a_config_file_may_name_a_server_of_this_machine(tmp_path: Path, server: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f'grpo:\n  server: "{server}"\n')
    assert layers.gather(parse(["--config", str(path)]), {}).told("grpo.server")[0] == server  # type: ignore[index]


@pytest.mark.parametrize("key", ["python", "ssh_options"])
def test_a_hosts_file_that_lies_here_is_not_obeyed_unasked(stoker: Stoker, key: str) -> None:
    owned, program = stoker.cwd / "owned", stoker.cwd / "planted.sh"
    program.write_text(f"#!/bin/sh\ntouch '{owned}'\n")
    program.chmod(0o755)
    hosts = {
        "python": f"hosts: [{{host: localhost, python: {program}}}]\n",
        "ssh_options": f"ssh_options: ['-oProxyCommand={program}']\nhosts: [nowhere.example]\n",
    }
    (stoker.cwd / "cluster.yaml").write_text(hosts[key])
    done = stoker("cluster", "check", "--quick")
    assert done.code == 64 and "--hosts cluster.yaml" in done.err, done.err
    assert not owned.exists()
    stoker("cluster", "check", "--quick", "--hosts", "cluster.yaml")  # the test is real: asked, it is obeyed
    assert owned.exists() or (key == "ssh_options" and not shutil.which("ssh"))


def test_a_config_by_name_is_ours_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = files.shipped()[0]
    (tmp_path / name).write_text("{planted: true}\n")
    monkeypatch.chdir(tmp_path)
    assert "planted" not in files.load(name) and files.load(f"./{name}") == {"planted": True}
