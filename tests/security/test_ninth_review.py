"""What a ninth security review found in config files, exports, data readers and the transformers engine: each test shows one way in, and that it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.config import files, layers
from stoker.training.config.flags import parse
from stoker.training.config.keys import KEYS

# ---- a config file that switches on a model's own code ----

SPELLINGS = {
    "section": "model:\n  load: m\n  trust_remote_code: true\n",
    "dashes": "model:\n  trust-remote-code: yes\n",
    "dotted": "model.trust_remote_code: true\n",
    "dotted, dashes": "model.trust-remote-code: 'true'\n",
    "alone": "trust_remote_code: true\n",
    "section of the notes": "training:\n  trust_remote_code: true\n",
    "JSON": '{"model": {"trust_remote_code": true}}',
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
