"""Published models' tokenizers and chat templates: the ids of transformers, whatever stands in a message."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("transformers")

import transformers

from conftest import EVERYTHING
from published import CHATML, PUBLISHED, Published, byte_level, conversation
from stoker.training.data.encode import pair_ids
from stoker.training.data.formats.format import Unusable, in_bytes
from stoker.training.data.formats.preferences import preference
from stoker.training.data.formats.table import FORMATS
from stoker.training.reward.pairs import messages_of
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.chat import Conversation, Turn, Unfit
from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, load


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {name: like.folder(root / name, as_file=name == "gemma") for name, like in PUBLISHED.items()}


def ours(messages: list[dict[str, Any]], tools: Any = None) -> Conversation:
    made = Conversation(
        Turn(one["role"], one["content"].encode(), {key: one[key] for key in chat.MORE if key in one})
        for one in messages
    )
    made.tools = tools or ()
    return made


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_is_the_ids_of_transformers(name: str, folders: dict[str, Path]) -> None:
    like = PUBLISHED[name]
    theirs, mine = transformers.AutoTokenizer.from_pretrained(str(folders[name])), load(str(folders[name]))
    dice = random.Random(name)
    for _ in range(50 if EVERYTHING else 15):
        messages, tools = conversation(dice, like)
        told = {"tools": tools, "tokenize": True, "return_dict": True}
        want = theirs.apply_chat_template(messages, **told)["input_ids"]
        encoded = chat.encoded(mine, ours(messages, tools))
        assert encoded.only_last or encoded.ids.tolist() == want, messages
        assert encoded.ids.tolist() == want[: len(encoded.ids)]
        assert (like.learned == "last") <= encoded.only_last <= ("last" in like.learned) or len(messages) < 4
        asked = messages[: max(place for place, one in enumerate(messages) if one["role"] == "user") + 1]
        want = theirs.apply_chat_template(asked, add_generation_prompt=True, **told)["input_ids"]
        assert chat.prompt(mine, ours(asked, tools)) == want, asked


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_turn_that_is_continued_and_templates_variables_give_the_ids_of_transformers(
    name: str, folders: dict[str, Path]
) -> None:
    theirs, mine = transformers.AutoTokenizer.from_pretrained(str(folders[name])), load(str(folders[name]))
    asked = [{"role": "user", "content": "the river"}]
    begun = [*asked, {"role": "assistant", "content": " seven boats"}]
    want = theirs.apply_chat_template(begun, continue_final_message=True, return_dict=True)["input_ids"]
    assert chat.prompt(mine, ours(begun), continues=True) == want
    marked = [*asked, {"role": "assistant", "content": f"seven boats and {PUBLISHED[name].end}"}]
    assert chat.prompt(mine, ours(marked), continues=True)[-1] not in mine.special.values(), "it stays text"
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        want = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, **variables)["input_ids"]
        assert chat.prompt(mine, ours(asked), variables) == want
    closed = theirs.apply_chat_template(asked, add_generation_prompt=False, return_dict=True)["input_ids"]
    assert chat.prompt(mine, ours(asked), opens_turn=False) == closed


@pytest.mark.parametrize("name", [name for name, like in PUBLISHED.items() if "turns" in like.learned])
def test_each_answer_is_learned_up_to_the_token_that_ends_it(name: str, folders: dict[str, Path]) -> None:
    mine = load(str(folders[name]))
    turns = [("user", b"the river"), ("assistant", b"boats"), ("user", b"and"), ("assistant", b"seven boats")]
    encoded = chat.encoded(mine, turns)
    learned = mine.decode(encoded.ids[encoded.mask != 0].tolist())
    end = PUBLISHED[name].end
    answers = ["boats", "seven boats"] if not encoded.only_last else ["<think>\n\n</think>\n\nseven boats"]
    assert [part.strip() for part in learned.split(end)] == [*answers, ""]
    assert encoded.only_last == (name == "qwen-3")
    assert mine.stop_ids[0] == mine.special[end]
    assert 0 <= encoded.size - len("".join(answers)) <= 4, "blanks that the template puts around"


def test_the_first_token_behind_an_answer_ends_it(folders: dict[str, Path]) -> None:
    for name, like in PUBLISHED.items():
        mine = load(str(folders[name]))
        assert mine.stop_ids[0] == mine.special[like.end], name
    phi = load(str(folders["phi-3"]))
    assert phi.stop_ids == (phi.special["<|end|>"], phi.special["<|endoftext|>"])
    told = Tokenizer(phi.data, phi.config, "here", {"generation_config.json": b'{"eos_token_id": [2, 7, "x", 99999]}'})
    assert told.stop_ids == (phi.special["<|end|>"], 2, 7, phi.special["<|endoftext|>"])


def test_marks_of_the_template_say_what_is_learned(folders: dict[str, Path]) -> None:
    theirs, mine = transformers.AutoTokenizer.from_pretrained(str(folders["smollm"])), load(str(folders["smollm"]))
    dice = random.Random(1)
    for _ in range(20):
        messages, _ = conversation(dice, PUBLISHED["smollm"])
        want = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        encoded = chat.encoded(mine, ours(messages))
        assert encoded.mask.tolist() == want["assistant_masks"] and not encoded.only_last


def test_a_template_that_rewrites_earlier_turns_teaches_the_last_one(folders: dict[str, Path]) -> None:
    mine = load(str(folders["qwen-3"]))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "why"}]
    encoded = chat.encoded(mine, ours([*turns, *turns]))
    learned = mine.decode(encoded.ids[encoded.mask != 0].tolist())
    assert encoded.only_last and learned == "<think>\nwhy\n</think>\n\nb<|im_end|>"
    encoded = chat.encoded(mine, ours([*turns, *turns, {"role": "user", "content": "not answered"}]))
    assert encoded.only_last and mine.decode(encoded.ids.tolist()).endswith("b<|im_end|>\n")


@pytest.mark.parametrize("name", PUBLISHED)
def test_special_tokens_in_a_message_are_text(name: str, folders: dict[str, Path]) -> None:
    mine = load(str(folders[name]))
    marks = set(mine.special.values()) - {mine.special.get(mine.names.get("unk_token", ""))}

    def specials(text: str) -> list[int]:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        return [one for one in chat.encoded(mine, ours(turns)).ids.tolist() if one in marks]

    for mark in mine.special:
        assert specials(f"a{mark}b {mark}") == specials("a b"), mark
        assert not marks & set(mine.encode(f"{mark} a {mark}")), mark
    turns = [{"role": "user", "content": "a<s></s><|im_end|>b"}, {"role": "assistant", "content": "c"}]
    if mine.told.is_exact:
        assert "a<s></s><|im_end|>b" in mine.decode(chat.encoded(mine, ours(turns)).ids.tolist())


def test_a_tool_description_can_not_write_special_tokens(folders: dict[str, Path]) -> None:
    mine = load(str(folders["qwen-3"]))
    talk = ours(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], [{"<|im_end|>": "<|im_start|>"}]
    )
    ids = chat.encoded(mine, talk).ids.tolist()
    assert ids.count(mine.special["<|im_end|>"]) == ids.count(mine.special["<|im_start|>"]) == 3
    assert '{"<|im_end|>": "<|im_start|>"}' in mine.decode(ids)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_text_is_the_ids_of_transformers_with_its_first_token(name: str, folders: dict[str, Path]) -> None:
    theirs, mine = transformers.AutoTokenizer.from_pretrained(str(folders[name])), load(str(folders[name]))
    dice = random.Random(2)
    for _ in range(50):
        text = "".join(
            dice.choice(["the river ", "cafe\u0301", "ﬁ", " 東京", "\n", "12", "\u1e9b\u0323", "🙂", "A B"])
            for _ in range(6)
        )
        want = theirs(text)["input_ids"]
        assert [*mine.begin, *mine.encode(text)] == want, text
        assert mine.decode(mine.encode(text)) == theirs.decode(mine.encode(text), clean_up_tokenization_spaces=False)
    first = {"llama-3": "<|begin_of_text|>", "llama-2": "<s>", "gemma": "<bos>", "wordpiece": "[CLS]"}
    if name in first:
        assert mine.begin == (mine.special[first[name]],) and mine.start == list(mine.begin)
    if name == "chatml":
        assert mine.begin == () and mine.start == [mine.special["<|endoftext|>"]]


def test_add_bos_token_counts_where_the_post_processor_says_nothing(folders: dict[str, Path]) -> None:
    plain = byte_level(["<s>", "</s>"]).to_str().encode()
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    assert Tokenizer(plain, names, "here").begin == ()
    with_bos = Tokenizer(plain, {**names, "add_bos_token": True}, "here")
    assert with_bos.begin == (with_bos.special["<s>"],)


def test_bytes_that_are_no_text_become_tokens_in_every_kind(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        mine = load(str(folder))
        ids = mine.encode_bytes(b"boats \xff\xfe boats")
        assert ids and max(ids) < mine.vocab_size
        if name in ("llama-2", "gemma"):
            assert b"\xff\xfe" in mine.decode_bytes(ids)


def test_named_templates_and_the_one_for_tools(folders: dict[str, Path], tmp_path: Path) -> None:
    data = (folders["chatml"] / "tokenizer.json").read_bytes()
    listed = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
    ]
    mine = Tokenizer(data, {"chat_template": listed}, "here")
    talk = ours([{"role": "user", "content": "x"}])
    assert mine.decode(chat.prompt(mine, talk)) == "Dx"
    talk.tools = [{}, {}]
    assert mine.decode(chat.prompt(mine, talk)) == "T2"
    old = Tokenizer(data, {}, "here", {"chat_template.json": json.dumps({"chat_template": "J"}).encode()})
    assert old.decode(chat.prompt(old, talk)) == "J"


def test_our_own_template_is_chatml_as_ever(tmp_path: Path) -> None:
    from stoker.training.tokenizer.template import CHATML as WRITTEN

    plain = bytes_tokenizer()
    turns = [("user", b"a"), ("assistant", b"b")]
    for config in ({}, {"chat_template": WRITTEN}):
        mine = Tokenizer(plain.data, config, "here")
        assert mine.template is None and chat.encoded(mine, turns).ids.tolist() == chat.chat(plain, turns)[0].tolist()
    other = Tokenizer(plain.data, {"chat_template": CHATML}, "here")
    assert other.template is not None
    assert chat.encoded(other, turns).ids.tolist() == chat.chat(plain, turns)[0].tolist()
    assert chat.encoded(other, turns).mask.tolist() == chat.chat(plain, turns)[1].tolist()
    with pytest.raises(Unfit, match="no chat template for them"):
        chat.encoded(plain, ours([{"role": "assistant", "content": "", "tool_calls": [{}]}]))
    with pytest.raises(Unfit, match="empty conversation"):
        chat.encoded(plain, [])
    with pytest.raises(Unfit, match="no message is the assistant's"):
        chat.encoded(plain, [("user", b"a")])


def test_an_unusual_kind_of_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    from tokenizers import Regex, pre_tokenizers

    def make() -> object:
        made = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), nfc=True)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+|[\s\S]"), "isolated"), plain])
        return made

    like = Published(make, PUBLISHED["qwen-3"].template, {"eos_token": "<|im_end|>"}, "<|im_end|>")  # type: ignore[arg-type]
    folder = like.folder(tmp_path / "unknown")
    theirs, mine = transformers.AutoTokenizer.from_pretrained(str(folder)), load(str(folder))
    dice = random.Random(3)
    for _ in range(10):
        messages, tools = conversation(dice, like)
        want = theirs.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
        encoded = chat.encoded(mine, ours(messages, tools))
        assert encoded.ids.tolist() == want and encoded.mask.any()
        assert mine.encode(messages[0]["content"]) == theirs(messages[0]["content"])["input_ids"]


@pytest.mark.parametrize("name", ["llama-3", "qwen-3"])
def test_answers_of_a_pair_are_written_by_the_template_and_learned_after_the_prompt(
    name: str, folders: dict[str, Path]
) -> None:
    words = load(str(folders[name]))
    before = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for prompt in ([], before):
        asked = [*prompt, {"role": "user", "content": "three"}]
        row = {"prompt": asked, "chosen": "the river", "rejected": "the boats"}
        for (ids, learned), answer in zip(pair_ids(preference(row), words), ("the river", "the boats"), strict=True):
            text = words.decode(ids[learned].tolist())
            assert answer in text and "two" not in text and "three" not in text and words.decode(ids.tolist()) != text
            assert ids.tolist() == chat.answered(words, messages_of(asked), answer)


def test_a_row_with_tools_is_read_with_them_and_calls_make_turns_unlike() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    row = {"messages": [{"role": "user", "content": "add"}, call], "tools": '[{"name": "add"}]'}
    made = FORMATS["messages"]
    assert made.conversation is not None and "tools" in made.columns
    turns = in_bytes(made.conversation(row))
    assert list(turns.tools) == [{"name": "add"}] and turns[1] == Turn(
        "assistant", b"", {"tool_calls": call["tool_calls"]}
    )
    assert turns[1] != ("assistant", b"") and turns[1:] != [("assistant", b"")] and turns[0] == ("user", b"add")
    with pytest.raises(Unusable, match="'tools' is not JSON"):
        made.conversation({**row, "tools": "[add"})


def with_template(source: str) -> Tokenizer:
    return Tokenizer(bytes_tokenizer().data, {"chat_template": source}, "here")


@pytest.mark.parametrize(
    ("source", "text"), [("{{ '\\ud800' }}x", "?x"), ("{{ '\\ud83d' }}{{ '\\ude42' }}x", "??x")], ids=["half", "halves"]
)
def test_halves_of_characters_are_replaced(source: str, text: str) -> None:
    tokenizer = with_template(source)
    assert tokenizer.decode(chat.prompt(tokenizer, [("user", b"a")])) == text


def test_thinking_that_a_template_looks_for_is_found() -> None:
    source = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    encoded = chat.encoded(with_template(source), [("user", b"a"), ("assistant", b"<think>why</think>b")])
    assert b"why" not in bytes(number for number in encoded.ids.tolist() if number < 256)


def test_marked_parts_are_learned_however_many_there_are() -> None:
    many = "{% for a in range(200) %}{% for b in range(60) %}{% generation %}SPAN{% endgeneration %}GAP{% endfor %}{% endfor %}"
    turns = [("user", b"a"), ("assistant", b"b")]
    touching = chat.encoded(with_template(many.replace("SPAN", "a").replace("GAP", "")), turns)
    assert touching.mask.tolist() == [1] * 12_000 and touching.size == 12_000
    empty = chat.encoded(with_template(many.replace("SPAN", "").replace("GAP", "<|pad|>")), turns)
    assert len(empty.mask) == 12_000 and not empty.mask.any() and empty.size == 0
    apart = chat.encoded(with_template(many.replace("SPAN", "aé").replace("GAP", "b<|pad|>")), turns)
    assert apart.mask.tolist() == [1, 1, 1, 0, 0] * 12_000 and apart.size == 36_000


def test_threads_render_conversations_of_their_own() -> None:
    tokenizer = with_template("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")

    def written(number: int) -> bool:
        text = str(number).encode() * 50
        return (
            tokenizer.decode(chat.encoded(tokenizer, [("user", text), ("assistant", text)]).ids.tolist())
            == 2 * text.decode()
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(written, range(200)))
