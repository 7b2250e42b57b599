"""What the twenty-second review found in files of strangers: a config that sent a key away, data that filled a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.config import layers
from stoker.training.config.flags import parse

# ---- a config file names the server that gets the API key and the prompts ----

ELSEWHERE = {
    "an address": "http://192.0.2.7:8000",
    "a name": "http://collector.example:8000/v1",
    "behind one of ours": "http://127.0.0.1:8000,http://192.0.2.7:8000",
    "ours as its user": "http://127.0.0.1:8000@192.0.2.7:8000",
    "a name that looks like ours": "http://127.0.0.1.example:8000",
    "an address of all interfaces": "http://[::]:8000",
    "no address at all": "http://[::1:8000",
}


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


# ---- smaller ones ----
