"""Text to ids and back: exactly, on any bytes, the same in tiktoken, tokenizers and transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")

from stoker.contract.errors import Refusal
from stoker.training.data.learn import train
from stoker.training.tokenizer import alphabet, chat
from stoker.training.tokenizer.definition import GPT2, OURS, SPECIAL
from stoker.training.tokenizer.encoders import FastPlan, doubtful_characters, plan_fast, slow_encoder
from stoker.training.tokenizer.tokenizer import SEGMENT, Tokenizer, bytes_tokenizer, load, segments

WORDS = [
    "the",
    "river",
    "took",
    "7 boats",
    "and",
    "she'll",
    "not",
    "come",
    "back,",
    "über",
    "naïve",
    "東京",
    "🙂",
    "12345",
    "\n",
    "\n\n",
    "  indented",
    "x = y[0];",
]


def text(count: int, seed: int) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train([text(5000, 1), Path(__file__).read_text()], 600, str(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("kind", ["trained", "bytes"])
def test_any_bytes_come_back(kind: str, trained: Tokenizer) -> None:
    tokenizer = trained if kind == "trained" else bytes_tokenizer()
    dice = random.Random(2)
    hard = [
        b"",
        b"\0",
        bytes(range(256)),
        b"\xff\xfe",
        b"caf\xc3",
        "é\u0301 ﬁ \u017f \u212a".encode(),
        "\ufeff\u2028\u00a0".encode(),
        b"\xed\xa0\x80",
        b"\xf0\x9f\x99",
        b"<|endoftext|><|im_start|>",
        b" " * 70_000 + b"a",
        b"a" * 70_000,
        b"\r\n" * 9,
        text(3000, 3).encode(),
        dice.randbytes(5000),
        "ü".encode() * 40_000,
    ]
    for data in hard:
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data, data[:40]
    for _ in range(200):
        data = (
            dice.randbytes(dice.randrange(40))
            + text(3, dice.randrange(1000)).encode()
            + dice.randbytes(dice.randrange(3))
        )
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_special_tokens_in_a_text_are_text(trained: Tokenizer) -> None:
    for tokenizer in (trained, bytes_tokenizer()):
        for name in SPECIAL:
            assert (
                tokenizer.special[name] not in tokenizer.encode(f"a {name} b")
                and tokenizer.decode(tokenizer.encode(name)) == name
            )
        assert slow_encoder(tokenizer.data)("<|im_end|>").tolist() == tokenizer.encode("<|im_end|>")


def test_tiktoken_gives_the_ids_of_tokenizers(trained: Tokenizer) -> None:
    assert isinstance(trained.plan, FastPlan)
    slow = slow_encoder(trained.data)
    for seed in range(50):
        one = text(200, seed) + "".join(chr(random.Random(seed).randrange(32, 0x2FFF)) for _ in range(200))
        assert trained.encode(one) == slow(one).tolist()


def test_a_token_that_its_own_bytes_do_not_make_is_kept_from_tiktoken() -> None:
    """tokenizers merges (a, b) and (ab, c) but never (a, bc): where bc comes first, abc must not appear."""
    told = json.loads(bytes_tokenizer().data)
    model = told["model"]
    model["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    for number, token in enumerate(("bc", "ab", "abc")):
        model["vocab"][token] = 300 + number
    told["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = Tokenizer(json.dumps(told).encode(), {}, "made")
    assert (
        tokenizer.told.pattern == GPT2 and isinstance(tokenizer.plan, FastPlan) and tokenizer.plan.unreachable == (302,)
    )
    slow = slow_encoder(tokenizer.data)
    for one in ("abc", "aabcc", "ab abcab"):
        assert tokenizer.encode(one) == slow(one).tolist()
    assert tokenizer.encode("abc") == [97, 300]
    model["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"], ["c", "a"], ["a", "bc"]]
    model["vocab"]["ca"] = 303
    assert "stand apart" in str(
        plan_fast(Tokenizer(json.dumps(told).encode(), {}, "made").told, json.dumps(told).encode())
    )


def test_the_regex_engines_are_asked_about_every_character() -> None:
    assert doubtful_characters(OURS) == "" or doubtful_characters(OURS).startswith("\\U")
    assert "0000017f" in doubtful_characters("(?i:'s)")


def test_the_same_texts_train_the_same_tokenizer(tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([text(2000, seed) for seed in range(4)]))
    script = "import json, sys; from stoker.training.data.learn import train; print(train(json.load(open(sys.argv[1])), 500, sys.argv[2]).digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", script, str(texts), str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "RAYON_NUM_THREADS": name},
        ).stdout
        for name in ("1", "2", "3")
    }
    assert len(found) == 1


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="260 at least"):
        train(["abc"], 259, str(tmp_path))
    with pytest.raises(Refusal, match="too little text"):
        train(["abc"], 300, str(tmp_path))


def test_transformers_opens_the_folder_and_agrees(trained: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in (("trained", trained), ("bytes", bytes_tokenizer())):
        tokenizer.save(str(tmp_path / name))
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / name))
        one = text(300, 9)
        assert (
            theirs.encode(one, add_special_tokens=False) == tokenizer.encode(one)
            and theirs.decode(tokenizer.encode(one)) == one
        )
        assert theirs.eos_token_id == tokenizer.end_id and len(theirs) == tokenizer.vocab_size
        again = load(str(tmp_path / name))
        assert again.encode(one) == tokenizer.encode(one) and again.special == tokenizer.special
    assert load(str(tmp_path / "trained")).digest == trained.digest


def test_segments_join_to_the_whole_and_cut_where_lines_end() -> None:
    for data in (text(60_000, 1).encode(), b"a" * 200_000, "東".encode() * 60_000, b" \n" * 99_999, b"x\n" * 99_999):
        parts = list(segments(data))
        assert b"".join(parts) == data and max(map(len, parts)) <= SEGMENT and all(parts)
    assert all(part.endswith(b"\n") for part in list(segments(b"x\n" * 99_999)))
    assert all(part.decode() for part in segments("東".encode() * 60_000))


def test_a_chat_has_its_marks_by_id_and_learns_the_assistant_only(trained: Tokenizer) -> None:
    messages = [
        ("system", b"be brief"),
        ("user", b"hi <|im_end|>"),
        ("assistant", b"hello"),
        ("user", b"bye"),
        ("assistant", b"so long"),
    ]
    ids, mask = chat.chat(trained, messages)
    learned = [int(one) for one, bit in zip(ids, mask, strict=True) if bit]
    assert trained.decode(learned) == "hello<|im_end|>so long<|im_end|>"
    assert ids.tolist().count(trained.special["<|im_end|>"]) == 5 and trained.decode(ids.tolist()).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n"
    )
    assert trained.decode(chat.prompt(trained, messages[:2])).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"type": "Unigram", "vocab": [], "merges": []}}, "unk_id"),
        ({"model": {"type": "Morse", "vocab": {}, "merges": []}}, "its model is Morse"),
        ({"added_tokens": []}, "ends a text"),
        ({"model": None}, "not in the format"),
    ],
)
def test_a_tokenizer_that_can_not_be_used_is_refused_in_one_line(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(bytes_tokenizer().data), **change}))
    with pytest.raises(Refusal, match=says) as refused:
        load(str(tmp_path)).encode("x")
    assert "\n" not in refused.value.line and str(tmp_path) in refused.value.line


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match="does not exist"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(Refusal, match=r"no tokenizer\.json"):
        load(str(tmp_path))
    pytest.importorskip("huggingface_hub")
    script = "from stoker.training.tokenizer.tokenizer import load\nfrom stoker.contract.errors import Refusal\ntry: load('no-such-owner/no-such-name')\nexcept Refusal as r: print(r.line)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert "it can't be fetched from the hub" in done.stdout and done.stdout.count("\n") == 1


def test_the_alphabet_is_that_of_tokenizers() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(alphabet.CHARACTERS) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert alphabet.read(alphabet.written(bytes(range(256)))) == bytes(range(256)) and alphabet.read("東") is None
