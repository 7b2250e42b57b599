"""Downloaded and damaged models, adapters, checkpoints, records and dumps: one clear line each, no pickle, no code unless the
user says so, no link out of the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from conftest import Stoker, at_length, machine_json
from small_model import SHAPE, header_of_model, write_model, write_weights
from stoker.cli.main import main
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.frozen import as_json
from stoker.training.checkpoint.manifest import Manifest, encode
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import INDEX, kept_text, shape_for, shape_of
from stoker.training.model.outside_folder import only_weights
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

# ---- damaged files ----

CHAT = {"messages": [{"role": "user", "content": "cow?"}, {"role": "assistant", "content": "moo"}]}


def export(path: Path) -> list[str]:
    return ["export", str(path), str(path.parent / "out")]


def merge(path: Path) -> list[str]:
    return [*export(path), "--merge"]


def chat(path: Path) -> list[str]:
    return ["chat", str(path), "--device", "cpu", "--prompt", "cow?", "--max-tokens", "1"]


def serve(path: Path) -> list[str]:
    return ["serve", str(path), "--device", "cpu", "--port", "0"]


def sft(path: Path) -> list[str]:
    data = path.parent / "chats.jsonl"
    data.write_text(json.dumps(CHAT) + "\n")
    words = ["--data", str(data), "--data.validation", "0", "--parallel.device", "cpu", "--dry-run", "--no-preflight"]
    return ["train", "sft", "--model.load", str(path), *words]


def model(folder: Path) -> Path:
    write_model(folder / "model")
    return folder / "model"


def config(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (model(folder) / "config.json").write_bytes(content)
        return folder / "model"

    return make


def cut_weights(folder: Path) -> Path:
    path = model(folder) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    return folder / "model"


def long_header(folder: Path) -> Path:
    write_weights(model(folder) / "model.safetensors", b"{}", 0, 1 << 40)
    return folder / "model"


def other_dtype(folder: Path) -> Path:
    header, data = header_of_model()
    header["model.norm.weight"]["dtype"] = "F99"
    write_weights(model(folder) / "model.safetensors", json.dumps(header).encode(), data)
    return folder / "model"


def missing_shard(folder: Path) -> Path:
    header, _ = header_of_model()
    shards = {name: "model-00001-of-00002.safetensors" for name in header if name != "__metadata__"}
    (model(folder) / "model.safetensors").unlink()
    (folder / "model" / INDEX).write_text(json.dumps({"weight_map": shards}))
    return folder / "model"


def shard_elsewhere(folder: Path) -> Path:
    (model(folder) / "model.safetensors").unlink()
    (folder / "model" / INDEX).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    return folder / "model"


def link_out(folder: Path) -> Path:
    path = model(folder) / "config.json"
    path.rename(folder / "private.json")
    path.symlink_to("../private.json")
    return folder / "model"


def named_pipe(folder: Path) -> Path:
    path = model(folder) / "config.json"
    path.unlink()
    os.mkfifo(path)
    return folder / "model"


def pickle_only(folder: Path) -> Path:
    (model(folder) / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")
    return folder / "model"


def adapter(folder: Path, rank: int = 2) -> Path:
    """An adapter of rank 2. `rank`: what its settings say."""
    import torch
    from safetensors.torch import save_file

    base, made = model(folder), folder / "adapter"
    made.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 16), f"{name}.lora_B.weight": torch.zeros(16, 2)}
    save_file(tensors, made / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (made / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    return made


def wrong_rank(folder: Path) -> Path:
    return adapter(folder, rank=8)


def adapter_without_weights(folder: Path) -> Path:
    (adapter(folder) / "adapter_model.safetensors").unlink()
    return folder / "adapter"


def adapter_of_half_a_file(folder: Path) -> Path:
    path = adapter(folder) / "adapter_config.json"
    os.truncate(path, 20)
    return folder / "adapter"


def checkpoint(folder: Path, value: float = 1.0) -> Path:
    import torch

    from stoker.training.checkpoint.saver import Saver
    from stoker.training.model.config import tensors

    base = model(folder)
    about = {"model": as_json(shape_of(str(base))), "data": {"context": 16}, "tokenizer": str(base)}
    about["tokenizer_digest"] = bytes_tokenizer().digest
    state = {
        f"model.{name}": torch.full((sum(size[0] for size in sizes), *sizes[0][1:]), value)
        for name, sizes in tensors(SHAPE)
    }
    saver = Saver(str(folder / "checkpoints"), rank=0, world=1, token="t", say=print)
    assert saver.save(1, state, about, wait=True)
    saver.close()
    return folder / "checkpoints" / "step-00000001"


def cut_manifest(folder: Path) -> Path:
    path = checkpoint(folder) / "manifest.json"
    os.truncate(path, path.stat().st_size // 2)
    return path.parent


def changed_manifest(folder: Path) -> Path:
    path = checkpoint(folder) / "manifest.json"
    path.write_text(path.read_text().replace('"context": 16', '"context": 17'))
    return path.parent


def cut_part(folder: Path) -> Path:
    path = checkpoint(folder) / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    return path.parent


def part_is_a_pipe(folder: Path) -> Path:
    path = checkpoint(folder) / "rank-00000.safetensors"
    path.unlink()
    os.mkfifo(path)
    return path.parent


def part_of_another_model(folder: Path) -> Path:
    """Of the same size, and with other tensors."""
    path = checkpoint(folder) / "rank-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"model.norm.weight", b"model.gate.weight"))
    return path.parent


def dump(folder: Path) -> Path:
    rank = folder / "nan_step_3" / "rank-0"
    rank.mkdir(parents=True)
    report = {"step": 3, "rank": 0, "world": 1, "label": "CPU 0", "loss": "nan", "grad_norm": "nan", "phase": "forward"}
    (rank / "report.json").write_text(json.dumps({"report": report}))
    write_weights(rank / "gradients.safetensors", b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', 16)
    return rank


def cut_report(folder: Path) -> Path:
    os.truncate(dump(folder) / "report.json", 30)
    return folder / "nan_step_3"


def cut_gradients(folder: Path) -> Path:
    path = dump(folder) / "gradients.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    return folder / "nan_step_3"


def nan(path: Path) -> list[str]:
    return ["nan", str(path), "--tensor", "gradients/a"]


def run(folder: Path, record: str = '{"schema": 1}', verdict: str | None = None) -> Path:
    made = folder / "runs" / "20260101-000000-x"
    made.mkdir(parents=True)
    (made / "run.json").write_text(record)
    if verdict is not None:
        (made / "verdict.json").write_text(verdict)
    return made


def torn_record(folder: Path) -> Path:
    return run(folder, '{"schema": 1, "id": "2026')


def why(path: Path) -> list[str]:
    return ["why", path.name, "--runs-dir", str(path.parent)]


def cut_gguf(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"GGUF\x03\0\0\0\xff\xff")
    return folder / "model.gguf"


def over_it(path: Path) -> list[str]:
    return ["export", str(model(path.parent)), str(path), "--gguf", "--force"]


# What is damaged, the command that meets it, and its exit code.
DAMAGED: dict[str, tuple[Callable[[Path], Path], Callable[[Path], list[str]], int]] = {
    "weights that are cut off": (cut_weights, export, EX_DATAERR),
    "weights whose header is longer than the file": (long_header, chat, EX_DATAERR),
    "weights of an unknown dtype": (other_dtype, chat, EX_DATAERR),
    "config.json is a list": (config(b"[1, 2]"), sft, EX_DATAERR),
    "config.json is not JSON": (config(b'{"model_type": "llama",'), export, EX_DATAERR),
    "config.json lacks its keys": (config(b'{"architectures": ["LlamaForCausalLM"]}'), sft, EX_DATAERR),
    "config.json is not UTF-8": (config(b'{"model_type": "\xff\xfe"}'), serve, EX_DATAERR),
    "config.json is nested too deeply": (config(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), chat, EX_DATAERR),
    "config.json leads out of the folder": (link_out, export, EX_NOINPUT),
    "config.json is a named pipe": (named_pipe, sft, EX_NOINPUT),
    "an index names a shard that is missing": (missing_shard, chat, EX_NOINPUT),
    "an index names a file elsewhere": (shard_elsewhere, export, EX_DATAERR),
    "a pickle alone": (pickle_only, chat, EX_NOINPUT),
    "an adapter of another rank": (wrong_rank, chat, EX_CONFIG),
    "an adapter without weights": (adapter_without_weights, merge, EX_NOINPUT),
    "an adapter whose settings are cut off": (adapter_of_half_a_file, chat, EX_DATAERR),
    "a checkpoint whose manifest is cut off": (cut_manifest, export, EX_DATAERR),
    "a checkpoint whose manifest was changed": (changed_manifest, export, EX_DATAERR),
    "a checkpoint whose part is cut off": (cut_part, export, EX_DATAERR),
    "a checkpoint whose part is a named pipe": (part_is_a_pipe, export, EX_DATAERR),
    "a checkpoint with a part of another model": (part_of_another_model, export, EX_DATAERR),
    "a NaN dump whose report is cut off": (cut_report, nan, EX_DATAERR),
    "a NaN dump whose gradients are cut off": (cut_gradients, nan, EX_DATAERR),
    "a run record that is torn": (torn_record, why, EX_DATAERR),
    "a GGUF file that is cut off": (cut_gguf, over_it, 73),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_line_and_the_documented_exit_code(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(machine_json(0)))
    monkeypatch.setenv("STOKER_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --device cpu sets, for good
    monkeypatch.chdir(tmp_path)
    make, command, code = DAMAGED[case]
    (tmp_path / "files").mkdir()
    path = make(tmp_path / "files")
    capfd.readouterr()
    assert main(command(path)) == code
    err = capfd.readouterr().err
    last = err.splitlines()[-1]
    assert "Traceback" not in err and last.startswith("stoker: "), err
    assert os.path.basename(path) in last and not re.search(r"[\x00-\x08\x0b-\x1f]", last)
    assert not (tmp_path / "files" / "out").exists()


def test_an_empty_verdict_leaves_the_rest_of_the_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = run(tmp_path, verdict="")
    code = main(why(path))
    assert "Traceback" not in capfd.readouterr().err and code == 0


@at_length
def test_damage_that_a_rank_meets_ends_with_its_line_and_its_code(stoker: Stoker) -> None:
    cut_weights(stoker.cwd)
    (stoker.cwd / "questions.jsonl").write_text('{"prompt": "cow?", "answer": "moo"}\n')
    words = ("--evaluate.tasks", "questions.jsonl", "--device", "cpu", "--no-preflight")
    done = stoker.torch("train", "evaluate", "--model.load", "model", *words)
    assert done.code == EX_DATAERR and "Traceback" not in done.out + done.err
    assert "model.safetensors is damaged" in done.err


# ---- links and code ----


def test_an_export_copies_nothing_from_outside_the_models_folder(tmp_path: Path) -> None:
    from stoker.training.model.hf_write import beside

    model = tmp_path / "models--a--b" / "snapshots" / "1"
    model.mkdir(parents=True)
    (tmp_path / "token").write_text("a token")
    (model / "vocab.json").symlink_to(tmp_path / "token")
    with pytest.raises(Refusal, match="leads out of its folder"):
        beside(str(model / "vocab.json"))
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "0a").write_text("{}")
    (model / "tokenizer.json").symlink_to("../../blobs/0a")
    assert beside(str(model / "tokenizer.json")) == b"{}"


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


@pytest.mark.parametrize("place", ["text_config", "decoder"])
def test_code_that_a_part_of_the_model_names_is_not_run(stoker: Stoker, place: str) -> None:
    """Fuyu makes its decoder from `text_config`; transformers would ask on standard input whether to run its code."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    folder = stoker.cwd / "model"
    folder.mkdir()
    inner = {
        "model_type": "altclip_text_model", "vocab_size": 300, "auto_map": {"AutoModel": "modeling_evil.Evil"},
        "name_or_path": str(folder),
    }  # fmt: skip
    config = {
        "architectures": ["FuyuForCausalLM"], "model_type": "fuyu", "vocab_size": 300, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64, place: inner,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_evil.py").write_text(f"open({str(stoker.cwd / 'ran')!r}, 'w')\n")
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    bytes_tokenizer().save(str(folder))
    answers = stoker.cwd / "answers"
    answers.write_text("y\n" * 20)
    with answers.open() as stdin:
        done = stoker("chat", "model", timeout=110, stdin=stdin)
    assert not (stoker.cwd / "ran").exists() and done.code != 0
    assert "give --trust-remote-code if you trust it" in done.err, done.err[-600:]


def test_transformers_never_asks_whether_to_run_code() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    from transformers import dynamic_module_utils

    from stoker.training.model.outside import _library

    _library()
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE == 0
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        dynamic_module_utils.resolve_trust_remote_code(None, "a/model", False, True)


def test_another_name_for_a_key_that_runs_code_is_not_believed(tmp_path: Path) -> None:
    from stoker.training.model.hf_config import kept_text

    told = {"attribute_map": {"zz": "_attn_implementation"}, "zz": "evil/kernel", "text_config": {"attribute_map": {}}}
    kept = json.loads(kept_text(told))
    assert "attribute_map" not in json.dumps(kept) and kept["zz"] == "evil/kernel"


@pytest.mark.parametrize("name", ["generation_config.json", "config.yaml", "tokenizer_config.json"])
def test_an_export_copies_nothing_that_a_link_leads_to(stoker: Stoker, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    run = stoker.cwd / "run"
    bytes_tokenizer().save(str(stoker.cwd / "tokenizer"))
    model = Decoder(ModelConfig(layers=1, dim=64, heads=1, kv_heads=1, head_dim=64, ff=64, vocab_size=320), 64)
    model.start(1)
    hf.save(model, str(run / "hf"), say=lambda line: None, tokenizer_folder=str(stoker.cwd / "tokenizer"))
    private = stoker.cwd / "private"
    private.write_text('{"client_secret": "hunter2hunter2"}')
    place = run / name if name == "config.yaml" else run / "hf" / name
    place.unlink(missing_ok=True)
    place.symlink_to(private)
    done = stoker.torch("export", str(run / "hf"), "out")
    assert done.code != 0 and "leads out of its folder" in done.err, done.err
    assert not any("hunter2" in file.read_text(errors="replace") for file in stoker.cwd.glob("out/*"))
