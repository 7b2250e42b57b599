"""A stranger's text whose words are all different, and a model that is small and wide; tokens of services in text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import at_length
from stoker.contract import hostmemory, redact
from stoker.contract.names import Refusal

BODY = "Zx7f00Lk9QwS3bV81mN4pR6tY2uC5hJ0dG9aE7iB3kX1zO8sW4vM2q"  # of no service
HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
# Put together from pieces, so that no scanner takes this file for a leak.
TOKENS = {
    "google, of a machine": "ya" + "29.c." + BODY, "google, to refresh": "1/" + "/0g" + BODY, "gemini": "AQ" + ".Ab8RN6" + BODY,
    "slack, of a browser": "xox" + "c-123456789012-" + HEX, "slack, its cookie": "xox" + "d-" + BODY + "%2F" + BODY + "%3D",
    "gitlab, an agent": "gl" + "agent-" + BODY, "gitlab, oauth": "gl" + "oas-" + HEX, "gitlab, a runner": "GR" + "1348941" + BODY[:20],
    "gitlab, mail": "gl" + "imt-" + BODY[:25], "bedrock": "AB" + "SK" + BODY + BODY + "==", "bedrock, short": "bedrock-" + "api-key-" + BODY + BODY,
    "aws, a session": "IQoJ" + "b3JpZ2lu" + BODY + BODY, "stripe, organization": "sk_" + "org_live_" + BODY, "elevenlabs": "sk" + "_" + HEX[:48],
    "cerebras": "cs" + "k-" + BODY, "tavily": "tv" + "ly-dev-" + BODY, "supabase": "sb" + "_secret_" + BODY[:31], "sentry": "sntr" + "yu_" + HEX,
    "1password": "ops" + "_ey" + "J" + BODY, "doppler": "dp" + ".st.prd." + BODY, "terraform": BODY[:14] + ".atlas" + "v1." + BODY + BODY,
    "dropbox": "sl" + ".u." + BODY + BODY, "jina": "ji" + "na_" + BODY, "e2b": "e2" + "b_" + HEX[:40], "fireworks": "f" + "w_" + BODY[:22],
}  # fmt: skip
LOOK_ALIKE = (
    "sk_buff_head_init_of_the_kernel", "fc-list : family", "pul-lover", "fw_block_size=128", "rnd_generator_of_each_worker_and_rank", "dp.st.x",
    "1//0 division", "AQ.Abstract", "sb_secret_santa", "sl.Bash", "jina_embeddings_v3_small_en_text", "ops_eyeball", "tml-files", "gloas-1",
    "csk-learn-contrib-lightning-and-more", "phx_airport", "glimt-of-hope", "ya29.c.x", "xoxd-1", "bedrock-api-key-name", "pit_stop_12", "AKCprofile",
    "compass=north4west", "bypass=1", "lowpass=12.5", "monkey=patch12ab", "keypad=12345", "atlasv1.json", "vcp_layers=12", "e2b_model=gemma",
)  # fmt: skip


@pytest.mark.parametrize("service", TOKENS)
def test_tokens_of_services_are_hidden_in_text(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", [])
    token = TOKENS[service]
    for place in (
        "ValueError: it said {} and ended",
        '{{"a": "{}"}}',
        "https://host/v1/{}/x",
        "a\\n{}\\n",
        "['x', '{}']",
    ):
        shown = redact.whole(place.format(token))
        pieces = (token[at : at + 16] for at in range(4, len(token) - 16))
        assert not any(piece in shown for piece in pieces), shown
        assert redact.whole(shown) == shown


def test_names_that_are_written_as_one_word_are_a_secrets() -> None:
    for name in (
        "DBPASS",
        "PGPASS",
        "TS_AUTHKEY",
        "KEYPASS",
        "MEILI_MASTERKEY",
        "HFTOKEN",
        "TELEGRAM_BOTTOKEN",
        "PRIVKEY",
    ):
        assert redact.environment({name: "Zx7f00Lk9Qw"})[name] == redact.HIDDEN, name


@pytest.mark.parametrize("text", LOOK_ALIKE)
def test_what_only_begins_like_a_token_stays(text: str) -> None:
    assert redact.whole(f"it said {text} and ended") == f"it said {text} and ended"


def small_model(folder: Path, **changed: int) -> None:
    """Weights of some MB."""
    import torch

    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    sizes: dict[str, Any] = {
        "layers": 1,
        "dim": 8,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "ff": 16,
        "vocab_size": 300,
    }
    torch.manual_seed(1)
    hf.save(Decoder(ModelConfig(**{**sizes, **changed}), 4096), str(folder), say=lambda line: None)
    bytes_tokenizer().save(str(folder))


@pytest.mark.parametrize("wide", [{"ff": 1 << 16}, {"heads": 8192, "kv_heads": 8192}], ids=["inside", "heads"])
def test_a_model_that_is_wide_inside_and_nowhere_else_is_refused(wide: dict[str, int], tmp_path: Path) -> None:
    """50 MB of weights, 4 million wide, took more than 10 GB for a prompt of 288 characters."""
    pytest.importorskip("torch")
    from stoker.training.model.hf_config import shape_of

    small_model(tmp_path / "wide", **wide)
    with pytest.raises(Refusal, match=r"wide inside and 8 outside"):
        shape_of(str(tmp_path / "wide"))


def test_keys_and_values_beyond_the_memory_that_is_free_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 17 MB kept 9 GB of them for `stoker chat`."""
    torch = pytest.importorskip("torch")
    from stoker.training.generate.conversation import opened
    from stoker.training.serve.batch import BatchEngine

    small_model(tmp_path / "deep", layers=64, heads=512, kv_heads=512)
    model, words = opened(str(tmp_path / "deep"), 4096, torch.device("cpu"), lambda line: None)
    total, free = 8 << 30, 1 << 30
    monkeypatch.setattr(hostmemory, "memory", lambda: (total, free, None))
    with pytest.raises(Refusal, match=r"keys and values of 4,\d\d\d tokens take 8.* and 1.* is free"):
        BatchEngine(model, rows=1, length=4096, vocab=words.vocab_size)
    BatchEngine(model, rows=1, length=128, vocab=words.vocab_size)


@at_length
def test_a_wide_model_reads_fewer_tokens_at_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve.engine import PagedEngine, Sizes
    from stoker.training.serve.request import Request

    c = ModelConfig(layers=1, dim=8, heads=2, kv_heads=2, head_dim=8, ff=1 << 18, vocab_size=300)
    made = PagedEngine(Decoder(c, 4096), Sizes(1, 4096, 8192, prompt_tokens=8192))
    made.add(Request("a", tuple([7] * 2500), 1))
    made.step()
    assert made.schedule.prompt_tokens == 1024


def test_a_runs_words_are_text_in_the_card_of_its_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from stoker.training.generate.exporting import card_of

    (tmp_path / "config.yaml").write_text("data:\n  path: ['a<img src=x>|b', '[text](https://example.org)']\n")
    card = card_of(str(tmp_path), "sft\n# A heading\x1b[31m<script>alert(1)</script>")
    before_settings = card.partition("## Settings")[0]
    assert "\n# A heading" not in card and "\x1b" not in card
    assert "<script" not in before_settings and "<img" not in before_settings and "\\[text\\](" in before_settings


@at_length
def test_capped_scores_of_many_heads_are_stored_for_few_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MB of weights took 5 GB for a prompt of 300 tokens."""
    torch = pytest.importorskip("torch")
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve import engine
    from stoker.training.serve.batch import BatchEngine
    from stoker.training.serve.request import Request

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"layers": 2, "dim": 16, "heads": 64, "kv_heads": 64, "head_dim": 8, "ff": 16}
    model = Decoder(ModelConfig(**sizes, vocab_size=300, attention_cap=50.0), 4096)
    made = engine.PagedEngine(model, engine.Sizes(1, 4096, 8192, prompt_tokens=8192))
    made.add(Request("a", tuple([7] * 2500), 1))
    made.step()
    assert made.schedule.prompt_tokens == 1024

    def answers() -> list[list[int]]:
        written = BatchEngine(model, rows=2, length=128)
        return written.generate([[7, 9, 11] * 20, [5] * 30], new_tokens=8, stop={1}, temperature=0.0)

    whole = answers()
    monkeypatch.setattr(engine, "_NUMBERS_AT_ONCE", 64 * 128 * 7)
    assert answers() == whole, "a prompt that is read in pieces is answered alike"


ASKS_FOR_MUCH = """
import sys
import torch
from stoker.contract import hostmemory
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group

hostmemory.memory = lambda: (8 << 30, 1 << 30, 8 << 30)
Group(ParallelConfig(strategy="ddp", device="cpu"))
torch.zeros(int(sys.argv[1]) << 20, dtype=torch.uint8)
"""


@pytest.mark.parametrize(("ranks", "megabytes", "given"), [(1, 900, True), (1, 1100, False), (2, 600, False)])
def test_a_rank_on_the_cpu_takes_no_more_than_its_part_of_what_is_free(ranks: int, megabytes: int, given: bool) -> None:
    more = {"LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": "1", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASKS_FOR_MUCH, str(megabytes)],
        env={**os.environ, **more},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == given, done.stderr
    assert given or "can't allocate memory" in done.stderr
