"""Tokenizers and chat templates built like those of published models, small and written for the tests: the structure is
theirs (which kind of tokenizer, which marks, what the template does with roles, tools and thinking), the words are not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The river took seven boats and she'll not come back, 12345 times.",
    "user assistant system tool [INST] [/INST] Human: Assistant: A chat between a curious user and a model.",
    "def f(x):\n    return x[0] * 2  # über naïve café 東京 🙂",
    '{"name": "weather", "arguments": {"city": "Oslo"}} <think> </think> today is a day',
    "Question and answer, one word after another; tabs\tand   many blanks.\n\nNew lines too.",
]
Made = tokenizers.Tokenizer


def special(*names: str, **flags: bool) -> list[tokenizers.AddedToken]:
    return [tokenizers.AddedToken(name, special=True, normalized=False, **flags) for name in names]


def byte_level(marks: Sequence[str], *, nfc: bool = False, bos: str = "", size: int = 400) -> Made:
    made = Made(models.BPE())
    made.normalizer = normalizers.NFC() if nfc else None
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(special(*marks))
    if bos:
        made.post_processor = _before(made, bos)
    return made


def byte_fallback(marks: Sequence[str], *, prefix: bool = True, bos: str = "<s>", **flags: bool) -> Made:
    """As Llama 2, Mistral (a blank before each text) and Gemma (none)."""
    trained = Made(models.BPE(unk_token="<unk>", fuse_unk=True))
    blanks = normalizers.Replace(" ", "\u2581")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blanks]) if prefix else blanks
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=first, show_progress=False, max_token_length=8)
    )
    told = json.loads(trained.to_str())
    told["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    told["added_tokens"] = told["added_tokens"][:3]
    told["pre_tokenizer"] = None
    parts: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made = Made.from_str(json.dumps(told))
    made.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    made.add_special_tokens(special(*marks, **flags))
    if bos:
        made.post_processor = _before(made, bos)
    return made


def unigram(marks: Sequence[str]) -> Made:
    made = Made(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    first = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=first, unk_token="<unk>", show_progress=False)
    )
    made.add_special_tokens(special(*marks))
    return made


def word_piece(marks: Sequence[str]) -> Made:
    made = Made(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=first, show_progress=False)
    )
    made.add_special_tokens(special(*marks))
    made.post_processor = _before(made, "[CLS]")
    return made


def _before(made: Made, bos: str) -> Any:
    return processors.TemplateProcessing(single=f"{bos} $A", pair=None, special_tokens=[(bos, made.token_to_id(bos))])


CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}
  {%- set rest = messages[1:] %}{%- set first = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{%- else %}{%- set rest = messages %}{%- set first = '' %}{%- endif %}
{%- for message in rest %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
  {%- set text = first + message['content'] if loop.first else message['content'] %}
  {%- if message['role'] == 'user' %}{{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
  {%- else %}{{- ' ' + text.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}
"""

LLAMA3 = """\
{%- for message in messages %}
{%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
{%- if loop.first %}{%- set text = bos_token + text %}{%- endif %}
{{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL_TOOLS = """\
{%- set ns = namespace(last_user=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.role == 'user' %}
    {%- if tools and loop.index0 == ns.last_user %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
    {{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.tool_calls is defined and m.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls %}{{- (call.function | tojson) + (', ' if not loop.last else '') }}{%- endfor %}
    {{- ']' + eos_token }}
  {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + ({'content': m.content} | tojson) + '[/TOOL_RESULTS]' }}
  {%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% set lead = '' %}
{%- if messages[0]['role'] == 'system' %}{% set lead = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (lead if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}{% endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- set ns.found = true %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] in ('user', 'system', 'assistant') %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = """\
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- set messages = messages[1:] %}
{%- else %}{{- 'A chat between a user and a model.' }}{%- endif %}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- ' USER: ' + m['content'] }}{%- else %}{{- ' ASSISTANT: ' + m['content'] + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}
"""

DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m['role'] == 'system' %}{{- m['content'] }}
{%- elif m['role'] == 'user' %}{{- '<\uff5cUser\uff5c>' + m['content'] }}
{%- elif m['role'] == 'assistant' %}
{%- set content = m['content'].split('</think>')[-1] if '</think>' in m['content'] else m['content'] %}
{{- '<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{%- endif %}
"""

COMMAND_R = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}\
{% if system != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}{% endif %}\
{% for message in loop_messages %}{% set content = message['content'] %}\
{% if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}\
{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

SMOLLM = """\
{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are a small model.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
  {%- if message['role'] == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
  {%- else %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

BERT_LIKE = """\
{%- for message in messages %}{{- '[' + message['role'] | upper + '] ' + message['content'] + ' [SEP] ' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '[ASSISTANT]' }}{%- endif %}
"""

_CHATML_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MISTRAL_MARKS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_DEEPSEEK_MARKS = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
)  # fmt: skip
_COMMAND_MARKS = (
    "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
)  # fmt: skip


class Published:
    """`learned`: how it shows what the assistant wrote. `end`: the token that ends an answer."""

    def __init__(
        self, make: Callable[[], Made], template: str, names: dict[str, str], end: str, learned: str = "turns"
    ) -> None:
        self.make, self.template, self.names, self.end, self.learned = make, template, names, end, learned
        self.tools = self.thinks = "tool_calls" in template
        self.roles_alternate = "alternate" in template

    def folder(self, where: Path, as_file: bool = False) -> Path:
        where.mkdir(parents=True, exist_ok=True)
        made = self.make()
        if "<think>" in self.template:
            made.add_tokens([tokenizers.AddedToken(one, normalized=False) for one in ("<think>", "</think>")])
        made.save(str(where / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.names}
        if as_file:
            (where / "chat_template.jinja").write_text(self.template)
        else:
            config["chat_template"] = self.template
        (where / "tokenizer_config.json").write_text(json.dumps(config))
        return where


def _s(**more: str) -> dict[str, str]:
    return {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **more}


PUBLISHED = {
    "chatml": Published(lambda: byte_level(_CHATML_MARKS), CHATML, {"eos_token": "<|im_end|>"}, "<|im_end|>"),
    "llama-2": Published(lambda: byte_fallback(()), LLAMA2, _s(), "</s>"),
    "llama-3": Published(
        lambda: byte_level(
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            bos="<|begin_of_text|>",
        ),
        LLAMA3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "<|eot_id|>",
    ),
    "mistral-v3": Published(lambda: byte_fallback(_MISTRAL_MARKS), MISTRAL_TOOLS, _s(), "</s>", "turns or last"),
    "gemma": Published(
        lambda: byte_fallback(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), prefix=False, bos="<bos>"),
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        "<end_of_turn>",
    ),
    "phi-3": Published(
        lambda: byte_fallback(("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), rstrip=True),
        PHI3,
        _s(eos_token="<|endoftext|>"),
        "<|end|>",
        "last",
    ),
    "qwen-3": Published(
        lambda: byte_level(_CHATML_MARKS, nfc=True), QWEN3, {"eos_token": "<|im_end|>"}, "<|im_end|>", "turns or last"
    ),
    "zephyr": Published(lambda: byte_fallback(("<|user|>", "<|system|>", "<|assistant|>")), ZEPHYR, _s(), "</s>"),
    "vicuna": Published(lambda: byte_fallback(()), VICUNA, _s(), "</s>"),
    "deepseek": Published(
        lambda: byte_level(_DEEPSEEK_MARKS, bos=_DEEPSEEK_MARKS[0]),
        DEEPSEEK,
        {"bos_token": _DEEPSEEK_MARKS[0], "eos_token": _DEEPSEEK_MARKS[1]},
        _DEEPSEEK_MARKS[1],
    ),
    "command-r": Published(
        lambda: byte_level(_COMMAND_MARKS, bos="<BOS_TOKEN>", nfc=True),
        COMMAND_R,
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        "<|END_OF_TURN_TOKEN|>",
    ),
    "smollm": Published(
        lambda: byte_level(_CHATML_MARKS), SMOLLM, {"eos_token": "<|im_end|>"}, "<|im_end|>", "marks"
    ),
    "unigram-chatml": Published(
        lambda: unigram(("<|im_start|>", "<|im_end|>")), CHATML, _s(), "<|im_end|>"
    ),
    "wordpiece": Published(
        lambda: word_piece(("[USER]", "[ASSISTANT]", "[SYSTEM]")),
        BERT_LIKE,
        {"cls_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]"},
        "[SEP]",
    ),
}  # fmt: skip

_WORDS = (
    "the river", "boats,", " ", "\n", "\n\n", "12345", "über", "naïve", "cafe\u0301", "東京", "🙂", "x[0]", "<think>\nhm\n</think>\n\n", "\tx",
    "[IN x", "\u2581", "{{ 7 }}", "{% x %}", "'quoted\"", "\\n", "  two", "ﬁne", "\u200b",
)  # fmt: skip


def conversation(dice: random.Random, like: Published) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages, and tools where the template knows them."""

    def text() -> str:
        return "".join(dice.choice(_WORDS) for _ in range(dice.randrange(1, 9))) or "a"

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if dice.random() < 0.4 else []
    tools = None
    if like.tools and dice.random() < 0.5:
        tools = [{"type": "function", "function": {"name": "weather", "description": text(), "parameters": {}}}]
    for _ in range(dice.randrange(1, 4)):
        messages.append({"role": "user", "content": text()})
        if tools and dice.random() < 0.5:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"city": text()}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(), "name": "weather"})
        messages.append({"role": "assistant", "content": text()})
        if like.thinks and dice.random() < 0.3:
            messages[-1]["reasoning_content"] = text()
    return messages, tools
