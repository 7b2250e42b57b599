"""Files that cost far more than their bytes: one line, whichever reader they come to, and a limit behind all readers."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from stoker.contract.effort import LookingAt, looking_at_file

from conftest import Stoker, at_length
from stoker.contract.names import Refusal
from stoker.control.cluster import listing
from stoker.control.launch.console import LogLines
from stoker.training.forensics import reading


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        try:
            sum(range(1000))
        except Exception:  # what interrupts it is none
            pytest.fail("the limit was taken for a problem of the code's own")


def test_time_and_memory_are_limited() -> None:
    def look() -> None:
        with pytest.raises(Refusal, match="a file takes too much memory"), LookingAt("a file", room=64 << 20):
            bytearray(2 << 30)  # more than a process that has run many tests may hold without using it
        done.append(True)

    done: list[bool] = []
    with pytest.raises(Refusal, match="a file takes more than 0 s of CPU time"), LookingAt("a file", 0.2):
        spin(60)
    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(done) == 2
    assert len(bytearray(256 << 20)) == 256 << 20, "the limit is gone"


def test_other_threads_time_does_not_count() -> None:
    thread = threading.Thread(target=spin, args=(1.0,))
    begun = time.process_time()
    with LookingAt("a file", 0.4):
        thread.start()
        thread.join()
    assert time.process_time() - begun > 0.9, "the other thread took more than this one may"


def test_a_limit_that_ends_in_time_leaves_nothing_behind() -> None:
    """Bodies that end about when their time does: whatever comes, comes as a refusal, and nothing afterwards."""
    before = signal.getsignal(signal.SIGPROF)
    refused = 0
    for body in [0.1] * 12 + [1.0]:
        try:
            with LookingAt("outer", 0.1), LookingAt("inner", 0.1):
                until = time.thread_time() + body
                while time.thread_time() < until:
                    sum(range(200))
        except Refusal:
            refused += 1
    assert signal.getsignal(signal.SIGPROF) is before and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        sum(range(1000))
    assert refused, "the last body takes ten times what it may"


@at_length
def test_a_limit_of_a_generator_ends_though_its_body_takes_long_to_free() -> None:
    @contextmanager
    def limited() -> Iterator[None]:
        with LookingAt("a file", 0.4):
            yield

    for _ in range(3):
        with pytest.raises(Refusal, match="a file takes more"), limited():
            [[] for _ in iter(int, 1)]
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_limit_within_a_limit_leaves_the_outer_one() -> None:
    with pytest.raises(Refusal, match="outer takes more"), LookingAt("outer", 0.5):
        with LookingAt("inner", 5):
            spin(0.1)
        spin(60)
    with LookingAt("outer", 5), pytest.raises(Refusal, match="inner takes more"), LookingAt("inner", 0.2):
        spin(60)


def test_other_problems_are_one_line_and_sleeping_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="a file can't be read: KeyError"), LookingAt("a file", 0.1):
        time.sleep(0.3)
        raise KeyError
    with pytest.raises(Refusal, match="No such file"), looking_at_file("a file", str(tmp_path / "none")):
        (tmp_path / "none").read_bytes()


def test_links_that_multiply_are_not_followed(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"d{n}").mkdir()
        for name in "ab" if n < 29 else "":
            (tmp_path / f"d{n}" / name).symlink_to(f"../d{n + 1}")
    with pytest.raises(Refusal, match="in more than 64 ways"):
        listing.tree(str(tmp_path))


def test_links_among_the_ranks_of_a_dump_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"step": 5, "rank": 0, "world": 1, "label": "CPU 0", "loss": "nan", "grad_norm": "nan", "phase": "forward"}
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "report.json").write_text(json.dumps({"report": report}))
    for n in range(1, 50):
        (tmp_path / f"rank-{n}").symlink_to("rank-0")
    assert len(reading.ranks(str(tmp_path))) == 1


def test_a_checkpoint_of_impossible_experts_is_refused(stoker: Stoker) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.checkpoint.manifest import Manifest, encode

    size = {"dim": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "ff": 8, "vocab_size": 300, "experts_per_token": 1}
    for experts, layers, words in ((400_000_000, 1, "impossible size"), (100_000, 10_000, "experts in")):
        folder = stoker.cwd / str(experts) / "checkpoints" / "step-00000001"
        folder.mkdir(parents=True)
        model = {**size, "family": "mixtral", "experts": experts, "layers": layers}
        meta = {"model": model, "data": {"context": 64}, "stage": "pretrain"}
        (folder / "manifest.json").write_bytes(encode(Manifest(1, 1, "t", {}, {}, meta)))
        done = stoker.torch("export", str(folder), f"out{experts}")
        assert done.code != 0 and "Traceback" not in done.err, done.err
        assert words in done.err, done.err


@at_length
def test_a_table_that_transformers_computes_entry_by_entry_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    from stoker.training.model import outside, outside_folder
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.hf_config import shape_for
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["MarianForCausalLM"], "model_type": "marian", "vocab_size": 300, "d_model": 4, "decoder_layers": 1,
        "encoder_layers": 1, "decoder_attention_heads": 1, "encoder_attention_heads": 1, "decoder_ffn_dim": 4,
        "encoder_ffn_dim": 4, "max_position_embeddings": 4_000_000, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    bytes_tokenizer().save(str(folder))
    monkeypatch.setattr(outside_folder, "SECONDS", 0.5)
    shape = shape_for(ModelConfig(), str(folder))
    with pytest.raises(Refusal, match="s of CPU time to look at"):
        outside.opened(shape, 64, torch.float32, torch.device("cpu"), lambda line: None)


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


def test_a_long_line_with_a_control_code_takes_its_time_once() -> None:
    for text in (b"x" * (8 << 20) + b"\x1b[0m\n", b"x" * (4 << 20) + b"\r\n" * 3, b"\r" * (1 << 20) + b"\x1b[0mend\n"):
        begun = time.thread_time()
        LogLines().feed(text)
        assert time.thread_time() - begun < 5, "38 s for a line of 256 KB, once"
