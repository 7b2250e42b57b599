"""A stranger's text whose words are all different, and a model that is small and wide; tokens of services in text."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import at_length
from stoker.contract import hostmemory, redact
from stoker.contract.names import Refusal


def all_different(size: int) -> Iterator[str]:
    """Text of so many bytes in which no word comes twice."""
    words = map("".join, itertools.product(string.ascii_letters, repeat=4))
    while size > 0:
        piece = " ".join(itertools.islice(words, 10_000)) + "\n"
        size -= len(piece)
        yield piece


@at_length
def test_training_a_tokenizer_keeps_to_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    from stoker.training.data.config import DataConfig
    from stoker.training.data.prepare import prepare
    from stoker.training.tokenizer.config import TokenizerConfig

    (tmp_path / "book.txt").write_text("".join(all_different(9 << 20)))
    total, free = 8 << 30, 600 << 20
    monkeypatch.setattr(hostmemory, "memory", lambda: (total, free, None))
    data = DataConfig(path=(str(tmp_path / "book.txt"),), cache=str(tmp_path / "cache"), context_length=64)
    with pytest.raises(Refusal, match=r"takes more than .* of memory.*train_megabytes"):
        prepare(data, TokenizerConfig(vocab_size=300), lambda line: None)
    assert not any((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")), "nothing half-made stays"


def test_a_tokenizer_that_is_trained_apart_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from stoker.training.data.learn import train, train_apart

    texts = [*all_different(100_000), "the same words again, the same words again\n" * 50]
    here, apart = train(texts, 400, str(tmp_path / "here")), train_apart(texts, 400, str(tmp_path / "apart"))
    assert here.digest == apart.digest
    with pytest.raises(Refusal, match="too little text"):
        train_apart(["ab"], 400, str(tmp_path / "none"))


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
