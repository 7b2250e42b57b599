"""Bent copies of valid files, with a seed: each is read, or refused in one line. No other exception, whatever is bent."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from small_model import header_of_model, write_model, write_weights
from stoker.contract.errors import Refusal
from stoker.contract.tensor_header import read_header
from stoker.control.cluster import hosts
from stoker.training.config.check import check
from stoker.training.config.flags import Flag
from stoker.training.config.layers import gather
from stoker.training.config.resolve import settle
from stoker.training.model import hf_config, hf_files
from stoker.training.tokenizer.definition import GPT2
from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

ROUNDS = 300
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7.5, 10**18, 10**30, -(10**30), float("nan"), float("inf"), 1e300, "", "²", "x", "\x1b[31m", "a\nb", "\0", "\ud800", "../../x",
    [], [[]], {}, {"a": 1}, [1, 2], ["x"], "9" * 400, "1e400", "[" * 50,
)  # fmt: skip


def bent(value: Any, dice: random.Random) -> Any:
    """A copy in which one place holds something else, is missing, or appears twice."""
    places = list(_places(value, ()))
    copy = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        path = dice.choice(places)
        if not path:
            return dice.choice(STRANGE)
        holder = copy
        try:
            for key in path[:-1]:
                holder = holder[key]
            what = dice.random()
            if what < 0.2:
                del holder[path[-1]]
            elif what < 0.3 and isinstance(holder, dict):
                holder[str(dice.choice(STRANGE))] = holder.pop(path[-1])
            else:
                holder[path[-1]] = deepcopy(dice.choice(STRANGE))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    return copy


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*path, key))


def bent_bytes(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 3, 10))):
        at = dice.randrange(len(made) + 1)
        what = dice.random()
        if what < 0.4 and at < len(made):
            made[at] = dice.randrange(256)
        elif what < 0.6:
            del made[at : at + dice.randrange(1, 20)]
        elif what < 0.8:
            made[at:at] = dice.choice(
                (
                    b"[",
                    b"{",
                    b"}",
                    b": ",
                    b"\0",
                    b"\xff",
                    b"&a ",
                    b"*a",
                    b"- ",
                    b"\n",
                    b"\t",
                    b"!!",
                    b"9" * 30,
                    b"'",
                    b'"',
                    b"\xef\xbb\xbf",
                    b"? ",
                    b"<<: ",
                )
            )
        else:
            del made[at:]
        if not made:
            made += b" "
    return bytes(made)


def refused_or_fine(read: Callable[[], Any], what: Any) -> bool:
    """False: it was refused."""
    try:
        read()
    except Refusal as refusal:
        assert "\n" not in refusal.line and "\x1b" not in refusal.line and len(refusal.line) < 20_000, refusal.line
        return False
    except ValueError as problem:
        raise AssertionError(f"{what!r}: {problem}") from problem
    return True


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


SETTINGS: dict[str, Any] = {
    "preset": "small", "learning_rate": 1e-4, "warmup": 0.1, "device_id": 0, "use_amp": True,
    "optim": {"kind": "adamw", "learning_rate": 0.001, "weight_decay": 0.1}, "model": {"layers": 2, "dim": 64, "heads": 2, "vocab_size": 300},
    "data": {"path": ["a.txt", "b.jsonl"], "context_length": 32, "validation": "0.1"}, "train": {"max_steps": 10, "batch_tokens": 4096},
    "run": {"nproc_per_node": 2, "show": "all"}, "checkpoint": {"resume": "auto"},
}  # fmt: skip
AS_YAML = b"""# a config
preset: small
optim: &o {learning_rate: 1e-3, weight_decay: 0.1}
model:
  layers: 2
  dim: 64
data:
  path:
    - a.txt
    - 'b.jsonl'
  validation: "0.1"
train: {max_steps: 10, eval_every: 5}
"""


def settings_from(path: Path) -> None:
    resolved = settle(gather([Flag("config", "--config", str(path))], {}), False)
    check(resolved.config, resolved.given)


def test_bent_configs(tmp_path: Path) -> None:
    dice, fine = random.Random(1), 0
    for number in range(ROUNDS):
        path = tmp_path / ("c.json" if number % 2 else "c.yaml")
        content = dumped(bent(SETTINGS, dice)) if number % 2 or number % 3 else bent_bytes(AS_YAML, dice)
        path.write_bytes(content)
        fine += refused_or_fine(lambda path=path: settings_from(path), content)
    assert 0 < fine < ROUNDS, "the changes are too tame, or too wild"


HOSTS: dict[str, Any] = {
    "defaults": {"user": "train", "python": "~/venv/bin/python", "workdir": "~/train"}, "ssh_options": ["-oCompression=yes"], "env": {"NCCL_DEBUG": "INFO"},
    "hosts": [{"host": "192.0.2.1", "slots": 2}, {"host": "b", "port": 22, "interface": "eth1", "gpus": "0,1"}, "user@c"],
}  # fmt: skip
HOSTS_YAML = b"""defaults: {user: train}
hosts:
  - {host: 192.0.2.1, slots: 2}
  - host: b
    port: 22
env:
  NCCL_DEBUG: INFO
"""


def test_bent_hosts_files(tmp_path: Path) -> None:
    dice, fine = random.Random(2), 0
    path = tmp_path / "cluster.yaml"
    for number in range(ROUNDS):
        content = dumped(bent(HOSTS, dice)) if number % 2 else bent_bytes(HOSTS_YAML, dice)
        path.write_bytes(content)
        fine += refused_or_fine(lambda: hosts.read_hosts_file(str(path)), content)
    assert 0 < fine < ROUNDS


def test_bent_safetensors_headers(tmp_path: Path) -> None:
    dice, fine = random.Random(3), 0
    header, size = header_of_model()
    path = tmp_path / "model.safetensors"
    for number in range(ROUNDS):
        content = dumped(bent(header, dice)) if number % 3 else bent_bytes(dumped(header), dice)
        write_weights(path, content, size, dice.choice((None, None, None, 0, len(content) + 8, 1 << 62)))
        fine += refused_or_fine(lambda: hf_files.stored_in(str(tmp_path)), content)
        try:
            for tensor in read_header(str(path)).tensors.values():
                assert 0 <= tensor.begin <= tensor.end <= path.stat().st_size
        except ValueError:
            pass
    assert 0 < fine < ROUNDS


def test_bent_tokenizers() -> None:
    dice, fine = random.Random(4), 0
    whole = json.loads(bytes_tokenizer().data)
    whole["model"]["vocab"] |= {"ab": 260, "abc": 261}
    whole["model"]["merges"] = [["a", "b"], ["ab", "c"]]
    for token in whole["added_tokens"]:
        token["id"] += 10
    whole["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    }
    small = {key: value for key, value in whole.items() if key != "model"} | {
        "model": {key: value for key, value in whole["model"].items() if key != "vocab"}
    }

    def read(data: bytes, config: Any) -> None:
        tokenizer = Tokenizer(data, config, "here")
        text = tokenizer.decode(tokenizer.encode("abc some text, ünïcode"))
        assert text == "abc some text, ünïcode" or not tokenizer.told.is_exact

    rounds = ROUNDS
    for number in range(rounds):
        changed = bent(small, dice)
        if isinstance(changed, dict) and isinstance(changed.get("model"), dict):
            changed["model"].setdefault("vocab", whole["model"]["vocab"])
        data = dumped(changed) if number % 4 else bent_bytes(dumped(whole), dice)
        config = dice.choice(
            ({}, {}, {"eos_token": dice.choice(STRANGE)}, {"eos_token": {"content": dice.choice(STRANGE)}})
        )
        fine += refused_or_fine(lambda data=data, config=config: read(data, config), data[-400:])
    assert 0 < fine < rounds


def test_bent_model_configs(tmp_path: Path) -> None:
    dice, fine = random.Random(5), 0
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for number in range(ROUNDS):
        content = dumped(bent(config, dice)) if number % 4 else bent_bytes(dumped(config), dice)
        if re.search(rb"\d{7}", content):
            continue  # sizes without a limit take memory without a limit
        (tmp_path / "config.json").write_bytes(content)
        fine += refused_or_fine(lambda: hf_files.check(str(tmp_path), hf_config.shape_of(str(tmp_path))), content)
    assert 0 < fine < ROUNDS
