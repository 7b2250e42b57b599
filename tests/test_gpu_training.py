"""Training on one real GPU: paths that no CPU takes. Skipped, with the reason, where there is none."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from conftest import Done, Stoker
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from test_real_gpu import WHY, _gpu, _holder, real  # noqa: F401  a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]

SHAPE = ModelConfig(layers=4, dim=256, heads=4, kv_heads=2, head_dim=64, ff=512, vocab_size=320)
PRETRAIN = (
    "train", "pretrain", "--quiet", "--no-preflight", "--data", "text.txt", "--tokenizer.path", "bytes", "--preset", "small", "--model.depth", "4",
    "--context_length", "256", "--data.validation", "0", "--log_every", "1", "--export", "false", "--eval_every", "0", "--timeout", "60s",
)  # fmt: skip
LONG_S = 280.0  # a compiler's first start


@pytest.fixture
def trainer(real: Stoker) -> Iterator[Stoker]:  # noqa: F811
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    lines = (" ".join(draw.choice(words) for _ in range(12)) for _ in range(25_000))
    (real.cwd / "text.txt").write_text("\n".join(lines))
    yield real


def losses(done: Done) -> list[float]:
    lines = map(json.loads, (done.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def trained(trainer: Stoker, *words: str) -> Done:
    done = trainer(*PRETRAIN, *words, timeout=LONG_S)
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    return done


def test_recomputed_fused_blocks_learn_what_the_others_learn(trainer: Stoker) -> None:
    """Fused blocks are the default on a GPU; selective recomputation keeps what products made, full keeps nothing, mlp
    all but the widest product."""
    curves = {
        how: losses(trained(trainer, "--batch.tokens", "4096", "--batch.micro", "8", "--max-steps", "8", "--recompute", how))
        for how in ("off", "selective", "full", "mlp", "1+mlp")
    }  # fmt: skip
    assert len(curves["off"]) == 8 and curves["off"][-1] < curves["off"][0]
    for how in ("selective", "full", "mlp", "1+mlp"):
        assert curves[how] == pytest.approx(curves["off"], rel=2e-3), how


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_fp16_with_a_scaled_loss_learns_what_bf16_does(graphs: str, trainer: Stoker) -> None:
    """Fused blocks, with the step as one CUDA graph and without; an overflow in plain blocks, where one can be injected."""
    words = ("--batch.tokens", "8192", "--batch.micro", "8", "--max-steps", "16", "--cuda_graphs", graphs)
    wanted = losses(trained(trainer, *words, "--dtype", "bf16"))
    done = trained(trainer, *words, "--dtype", "fp16")
    assert losses(done) == pytest.approx(wanted, rel=2e-2)
    lines = map(json.loads, (done.run_dir / "metrics.jsonl").read_text().splitlines())
    assert all(line["loss_scale"] >= 1024 for line in lines if "loss" in line)
    spoiled = trained(trainer, *words, "--dtype", "fp16", "--nan.inject", "grad:layers.0.mlp.down.weight@3")
    assert "step 3: a gradient overflowed in fp16" in spoiled.out and len(losses(spoiled)) == 16, spoiled.out[-3000:]


def test_fp8_runs_compiled_and_is_refused_with_fused_blocks(trainer: Stoker) -> None:
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9 or later")
    refused = trainer(*PRETRAIN, "--compile", "fused", "--fp8", "tensorwise")
    assert refused.code == 64 and "exclude each other" in refused.err, refused.err
    words = ("--dim", "1024", "--depth", "0", "--layers", "4", "--heads", "16", "--batch.tokens", "8192", "--batch.micro", "16", "--max-steps", "6")  # fmt: skip
    done = trained(trainer, *words, "--fp8", "tensorwise")
    assert losses(done)[-1] < losses(done)[0]
    assert losses(done) == pytest.approx(losses(trained(trainer, *words)), rel=6e-2)  # 2.9 % at worst on an H200


def test_no_cuda_graph_is_captured_around_ligers_loss(trainer: Stoker) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed here")
    words = ("--batch.tokens", "4096", "--batch.micro", "16", "--max-steps", "8", "--cuda_graphs", "on")
    logs, curves = dict[str, str](), dict[str, list[float]]()
    for loss in ("auto", "liger"):
        done = trained(trainer, *words, "--compute.loss", loss)
        logs[loss], curves[loss] = done.log(0).decode() + done.err, losses(done)
    assert "steps are launched kernel by kernel" in logs["liger"]
    assert "steps are launched kernel by kernel" not in logs["auto"]
    assert curves["liger"] == pytest.approx(curves["auto"], rel=2e-2)


def test_reward_trains_with_default_settings(trainer: Stoker) -> None:
    from stoker.training.model import hf
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer
    from test_reward import rows

    folder = trainer.cwd
    bytes_tokenizer().save(str(folder / "tokenizer"))
    model = Decoder(SHAPE, 512)
    model.start(3)
    hf.save(model, str(folder / "begin"), say=lambda line: None, tokenizer_folder=str(folder / "tokenizer"))
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows(400)))
    done = trainer("train", "reward", "--model.load", "begin", "--reward.pairs", "pairs.jsonl", timeout=LONG_S)
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    assert (done.run_dir / "hf" / "config.json").exists() and losses(done)[-1] < losses(done)[0]


def test_a_step_is_replayed_on_a_card_that_micro_auto_has_filled(trainer: Stoker) -> None:
    """The replay runs plain blocks, which keep twice what fused ones do."""
    card = _gpu()
    holder = _holder(trainer, (card.memory_total - card.memory_used) / 1e9 - 6, 240)
    try:
        done = trainer(
            *PRETRAIN, "--batch.tokens", str(1024 * 256), "--batch.micro", "auto", "--max-steps", "30",
            "--learning-rate", "1e30", "--warmup", "0", "--max-grad-norm", "0", timeout=LONG_S,
        )  # fmt: skip
    finally:
        holder.kill()
        holder.wait()
    assert done.verdict["cause"] == "nan.traced", (done.verdict, done.out[-2000:], done.err[-4000:])


def test_a_bad_step_before_a_meeting_of_local_sgd_is_replayed_with_its_own_weights(trainer: Stoker) -> None:
    done = trainer(
        *PRETRAIN, "--nproc-per-node", "2", "--gpus", "0", "--share-gpus", "--comm", "local:4", "--max-steps", "12",
        "--batch.tokens", "4096", "--batch.micro", "4", "--nan.inject", "layers.1.attention@3@1", timeout=LONG_S,
    )  # fmt: skip
    assert done.verdict["cause"] == "nan.traced" and done.verdict["rank"] == 1, (done.verdict, done.err[-4000:])
    assert "step 3: NaN first in " in done.verdict["summary"] and "layers.1.attention" in done.verdict["summary"]
