"""What a ninth security review found in config files, exports, data readers and the transformers engine: each test shows one way in, and that it is closed."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from conftest import Stoker, at_length
from stoker.contract.names import EX_CONFIG, EX_DATAERR, Refusal
from stoker.training.checkpoint.manifest import Manifest, encode
from stoker.training.config import files, layers
from stoker.training.config.flags import parse
from stoker.training.config.keys import KEYS
from stoker.training.generate.exporting import card_of
from stoker.training.model import hf_write
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import kept_text, shape_for
from stoker.training.model.outside_folder import only_weights
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

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


# ---- models of strangers that transformers computes ----


@pytest.fixture
def bloom(tmp_path: Path) -> Path:
    """A whole model of an architecture that no family of ours knows, with a tokenizer."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    torch.manual_seed(3)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=272, **none)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    bytes_tokenizer().save(str(tmp_path / "bloom"))
    return tmp_path / "bloom"


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def opened(folder: Path) -> Any:
    import torch

    from stoker.training.model import outside

    shape = shape_for(ModelConfig(), str(folder))
    return outside.opened(shape, 16, torch.float32, torch.device("cpu"), lambda line: None)


def own_code(folder: Path, planted: Path) -> None:
    change(
        folder, architectures=["OwnForCausalLM"], model_type="own",
        auto_map={"AutoConfig": "modeling_own.X", "AutoModelForCausalLM": "modeling_own.Y"},
    )  # fmt: skip
    (folder / "modeling_own.py").write_text(f"open({str(planted)!r}, 'w')\n")


def test_an_exported_checkpoint_cant_let_a_models_code_run(bloom: Path, tmp_path: Path, stoker: Stoker) -> None:
    own_code(bloom, tmp_path / "planted")
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    model = {"engine": "transformers", "trust_remote_code": True, "load": str(bloom)}
    model["kept"] = (bloom / "config.json").read_text()
    digest = load_tokenizer(str(bloom)).digest
    meta = {"model": model, "data": {"context": 16}, "tokenizer": str(bloom), "tokenizer_digest": digest}
    (step / "manifest.json").write_bytes(encode(Manifest(1, 1, "x", {}, {}, meta)))
    done = stoker.torch("export", str(tmp_path / "run"), "out")
    assert done.code == EX_DATAERR and not (tmp_path / "planted").exists()
    assert f"model {bloom}" in done.err and "--trust-remote-code" in done.err and "Traceback" not in done.err
    stoker.torch("export", str(tmp_path / "run"), "out", "--trust-remote-code")  # the user's own words
    assert (tmp_path / "planted").exists()


def test_a_checkpoint_does_not_say_that_code_is_trusted() -> None:
    from stoker.training.loop.resume import Data, Position, meta

    made: Any = SimpleNamespace(tokenizer_digest="")
    about = meta(Position(1, 1, 1, None), Data("", 0, 16, 1), ModelConfig(trust_remote_code=True), made, "adamw")
    assert about["model"]["trust_remote_code"] is False


NUMBERS = {
    "layers": {"n_layer": 10**7}, "width": {"hidden_size": 1 << 17}, "words": {"vocab_size": 1 << 40},
    "labels": {"num_labels": 10**9}, "no heads": {"n_head": 0}, "a text": {"hidden_size": "16"},
}  # fmt: skip


@pytest.mark.parametrize(
    "keys", [pytest.param(keys, id=name, marks=at_length if name == "labels" else ()) for name, keys in NUMBERS.items()]
)
def test_a_model_is_not_larger_than_its_stored_weights(bloom: Path, keys: dict[str, object]) -> None:
    change(bloom, **keys)
    with pytest.raises(Refusal, match=str(bloom)):
        opened(bloom)


def test_a_table_that_no_weight_needs_is_refused(bloom: Path) -> None:
    """Masks of old architectures have as many numbers as the context squared."""
    change(bloom, architectures=["GPTNeoForCausalLM"], model_type="gpt_neo", max_position_embeddings=1 << 20,
           num_layers=1, num_heads=2, attention_types=[[["global"], 1]])  # fmt: skip
    with pytest.raises(Refusal, match=r"many more (buffers|parameters) than"):
        opened(bloom)


def test_missing_weights_are_refused(bloom: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    opened(bloom)
    tensors = safetensors.load_file(bloom / "model.safetensors")
    tensors.pop(next(name for name in tensors if name.endswith("dense_h_to_4h.weight")))
    safetensors.save_file(tensors, bloom / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refusal, match=r"its weights have no .*dense_h_to_4h"):
        opened(bloom)


def test_transformers_sees_nothing_of_a_folder_but_its_safetensors(bloom: Path, tmp_path: Path) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "planted"),)

    torch.save({"x": Evil()}, bloom / "pytorch_model.bin")
    (bloom / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    (bloom / "model.safetensors").rename(bloom / "other.safetensors")
    with only_weights(str(bloom)) as folder:
        assert sorted(os.listdir(folder)) == ["generation_config.json", "model.safetensors"]
    opened(bloom)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_config_json_names_no_kernel_of_another_repository(bloom: Path, key: str, nested: bool) -> None:
    change(bloom, **({"text_config": {key: {"": "evil/kernel"}}} if nested else {key: "evil/kernel"}))
    with pytest.raises(Refusal, match=r"takes code from .*evil/kernel"):
        opened(bloom)
    change(bloom, text_config=None, **{key: "flash_attention_2"})
    assert key not in opened(bloom).config.kept
    assert key not in kept_text({"model_type": "llama", "inner": [{key: "evil/kernel"}], key: "evil/kernel"})


def test_code_of_another_repository_is_refused_even_with_trust(bloom: Path, tmp_path: Path) -> None:
    own_code(bloom, tmp_path / "planted")
    change(
        bloom, auto_map={"AutoModelForCausalLM": "modeling_own.Y", "AutoTokenizer": ["evil/other--file.Class", None]}
    )
    with pytest.raises(Refusal, match=r"takes code from .*evil/other"):
        shape_for(ModelConfig(trust_remote_code=True), str(bloom))


# ---- exports in shared folders, and of strangers' runs ----


@pytest.mark.parametrize("kind", ["pipe", "endless line"])
def test_a_strangers_metrics_are_read_within_bounds(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")
    metrics = tmp_path / "metrics.jsonl"
    if kind == "pipe":
        os.mkfifo(metrics)
    else:
        metrics.write_bytes(b" " * (2 << 20))
    with pytest.raises(Refusal, match=f"{metrics}: .*(named pipe|longer than)"):
        card_of(str(tmp_path))
    metrics.unlink()
    metrics.write_text('{"step": 1, "loss": 2.5}\nhalf a li')
    assert "| loss | 2.5 |" in card_of(str(tmp_path))


def test_what_a_stranger_left_in_a_shared_folder_ends_no_export(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("becoming a second user takes root")
    tmp_path.chmod(0o1777)
    for above in tmp_path.parents:
        if above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    theirs = tmp_path / f".model.{socket.gethostname()}-999999.tmp"
    mine = tmp_path / f".model.{socket.gethostname()}-999998.tmp"
    for folder, uid in ((theirs, 12345), (mine, 65534)):
        folder.mkdir()
        os.chown(folder, uid, uid)
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            hf_write.sweep(str(tmp_path), "model")
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert theirs.exists() and not mine.exists()
