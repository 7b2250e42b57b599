"""What the twenty-second review found in files of strangers: a config that sent a key away, data that filled a disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import run, train
from stoker.contract.names import EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.tensorheader import pack_header
from stoker.speedrun.gather import gather
from stoker.training.config import layers
from stoker.training.config.flags import parse
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import config_of
from stoker.training.model.hf_files import places
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

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


# ---- a config file that asks for more memory than there is ----

ASKS = {
    "width": "model: {layers: 2, dim: 4194304, heads: 32768}",
    "layers": "model: {layers: 10000, dim: 65536, heads: 512}",
    "ranks": "model: {layers: 1, dim: 64, heads: 1}\nbatch: {tokens: 80000000}\nrun: {nproc_per_node: 1000000}",
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_config_file_cant_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    given = "data: {path: [text.txt], context_length: 64}\ntokenizer: {path: tokenizer}\ntrain: {max_steps: 1}\nparallel: {device: cpu}"
    (tmp_path / "c.yaml").write_text(f"{given}\n{asks}\n")
    started: list[Any] = []
    monkeypatch.setattr(run, "start", lambda *told: started.append(told) or 0)
    with pytest.raises(Refusal, match=r"this does not fit: .* on the CPU with .* and this machine has"):
        train.main(["pretrain", "--config", "c.yaml"])
    assert not started


def test_a_config_file_names_no_more_layers_than_are_quickly_planned(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {layers: 10001, dim: 64, heads: 1}\nparallel: {device: cpu}\n")
    with pytest.raises(Refusal, match=r"model\.layers 10001 is out of range: from 1 to 10000"):
        train.main(["pretrain", "--config", str(path), "--dry-run"])


# ---- smaller ones ----

NUMBERS = {
    "a context beyond 32 bits": {"max_position_embeddings": 1 << 40},
    "a context below nothing": {"max_position_embeddings": -5},
    "a base beyond fp32": {"rope_theta": 1e300},
}


@pytest.mark.parametrize("keys", NUMBERS.values(), ids=NUMBERS)
def test_a_models_numbers_that_gguf_has_no_room_for_are_one_line(tmp_path: Path, keys: dict[str, Any]) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from published import PUBLISHED
    from stoker.cli import export

    folder = tmp_path / "model"
    PUBLISHED["llama-3"].folder(folder)
    c = ModelConfig(layers=1, dim=16, heads=1, kv_heads=1, head_dim=16, ff=16, vocab_size=448)
    (folder / "config.json").write_text(json.dumps({**config_of(c, 64, "float32"), **keys}))
    sizes = {part.name: ("F32", part.stored) for place in places(c) for part in place.parts}
    numbers = sum(math.prod(size) for _, size in sizes.values())
    (folder / "model.safetensors").write_bytes(pack_header(sizes, {"format": "pt"}) + bytes(4 * numbers))
    with pytest.raises(Refusal, match="can't be read") as problem:
        export.main([str(folder), str(tmp_path / "out.gguf"), "--gguf"])
    assert problem.value.code == EX_DATAERR and not [*tmp_path.glob("out*")]


def test_a_report_reads_a_run_once(tmp_path: Path) -> None:
    (tmp_path / "stages/x").mkdir(parents=True)
    (tmp_path / "stages/x/metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n' * 1000)
    rows = [{"name": f"n{number}", "stage": "sft", "run": f"stages/{'./' * number}x"} for number in range(5000)]
    (tmp_path / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))
    chain = gather(str(tmp_path))
    assert sum(len(stage.steps) for stage in chain.stages.values()) == 1000
