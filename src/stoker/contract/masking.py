"""Replaces secrets in text that leaves a process, for a record, a console or a message.

A secret is known in three ways: its name says so (`HF_TOKEN=...`, `--api-key ...`, `"password": "..."`), it has a
well-known shape (`hf_...`, `https://user:password@host`, a private key), or this process was given it
(`learn_secrets`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

MASK = "<redacted>"
Span = tuple[int, int]


def mask_text(text: str) -> str:
    """Return a text without its secrets."""
    text = _mask_known(text)
    return _mask_spans(text, _find_spans(text))


def mask_lines(text: str) -> list[str]:
    """Return the non-blank lines of an output. Masks first: a single line of a private key has no known shape."""
    return [line for line in mask_text(text).splitlines() if line.strip()]


def mask_value(name: str, value: str) -> str:
    """Return the value of a variable or setting, hidden if its name is a secret's."""
    return MASK if is_secret_name(name) and _is_secret_value(name, value) else mask_text(value)


def mask_argv(argv: Iterable[str]) -> list[str]:
    """Return the words of a command line without secrets: NAME=VALUE, and the word behind --api-key."""
    words = [_mask_known(word) for word in argv]
    return [_mask_spans(word, spans) for word, spans in zip(words, _find_spans_of_argv(words), strict=True)]


def mask_json(value: Any) -> Any:
    """Return a JSON value without secrets in texts and under keys. A list of texts is masked as a command line."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {mask_text(key) if isinstance(key, str) else key: _mask_entry(key, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        is_argv = all(isinstance(item, str) for item in value)
        return mask_argv(value) if is_argv else [mask_json(item) for item in value]
    return value


def allowed_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a record keeps: those that change how a job runs, without secrets."""
    from stoker.contract.schedulers import SCHEDULERS

    # All variables of a scheduler: `stoker why` finds the job of a run by them.
    prefixes = (*_RECORDED_PREFIXES, *(scheduler.job_variable.partition("_")[0] + "_" for scheduler in SCHEDULERS))
    return {
        name: mask_value(name, value)
        for name, value in sorted(variables.items())
        if name in _RECORDED or name.startswith(prefixes)
    }


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RECORDED = _words(
    "PATH LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV HOME LANG LC_ALL TMPDIR RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    " GROUP_RANK NODE_RANK TOKENIZERS_PARALLELISM"
)
_RECORDED_PREFIXES = (
    "STOKER_", "CUDA_", "CUBLAS_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_",
    "OPENBLAS_", "MASTER_", "PYTHON", "CONDA_", "HF_", "TRANSFORMERS_", "WANDB_", "ACCELERATE_", "UCX_",
)  # fmt: skip
# Readers of a record compare the values of these keys, and users never write them.
_OUR_KEYS = frozenset(("schema", "event", "run", "host", "status", "cause"))


def _mask_entry(key: Any, value: Any) -> Any:
    if key in _OUR_KEYS and isinstance(value, str):
        return value
    if isinstance(key, str) and is_secret_name(key):
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return MASK if _is_secret_value(key, str(value)) else value
        if isinstance(value, (list, tuple)):
            return [_mask_entry(key, item) for item in value]
    return mask_json(value)


def _find_spans_of_argv(words: list[str]) -> list[list[Span]]:
    """Return for each word the parts that are secrets."""
    spans: list[list[Span]] = []
    flag = ""
    for word in words:
        if flag and not word.startswith("-") and _is_secret_value(flag, word):
            spans.append([(0, len(word))])
        elif begin := _find_assigned_secret(word):
            spans.append([(begin, len(word))])
        else:
            spans.append(_find_spans(word))
        flag = word.lstrip("-") if word.startswith("--") and "=" not in word and is_secret_name(word) else ""
    return spans


def _find_assigned_secret(word: str) -> int:
    """Return where the secret begins in NAME=VALUE, --name=VALUE or --env=NAME=VALUE, or 0 if there is none."""
    name, equals, value = word.partition("=")
    if not equals or not _pattern(rf"-{{0,2}}[\w.-]{{1,{_MAX_NAME}}}").fullmatch(name):
        return 0
    if is_secret_name(name.lstrip("-")) and _is_secret_value(name, value):
        return len(name) + 1
    inner = _find_assigned_secret(value)
    return inner and len(name) + 1 + inner


def _find_spans(text: str) -> list[Span]:
    """Return where a text holds secrets, by names and by shapes, in order and without overlaps."""
    merged: list[Span] = []
    for begin, end in sorted([*_find_spans_by_words(text), *_find_spans_by_shape(text)]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif begin < end:
            merged.append((begin, end))
    return merged


def _mask_spans(text: str, spans: list[Span]) -> str:
    for begin, end in reversed(spans):
        text = text[:begin] + MASK + text[end:]
    return text


@lru_cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern at its first use: most commands need none of them."""
    return re.compile(pattern)


# ---- names ----

# A name with one of these words is a secret's: DB_PASSWORD, clientSecret.
_SECRET_WORDS = _words(
    "password passwords passwd passphrase passcode pwd secret secrets credential credentials creds authorization cookie"
    " cookies jwt mnemonic sshpass dsn webhook"
)
# Compounds that people write as one word: PGPASSWORD, apikey.
_SECRET_ENDINGS = (
    "password", "passwd", "passphrase", "secret", "apikey", "accesskey", "secretkey", "privatekey", "authkey",
    "authtoken", "accesstoken", "refreshtoken", "hftoken", "bottoken",
)  # fmt: skip
# A key or a token is a secret if it belongs to one of these: api_key, hub_token. Not num_key_value_heads, pad_token_id.
_KEY_OWNERS = _words(
    "access account admin anthropic api auth aws azure bearer bot client connection deploy encryption gemini gh git"
    " github gitlab google groq hf hub huggingface master npm oauth openai personal private pypi refresh registry"
    " replicate sas secret security service session signing slack ssh storage stripe telegram together vault wandb write"
)
# Variables that end in KEY or TOKEN are secrets (SERVICE_KEY), except those of data and tokenizers: SORT_KEY, PAD_TOKEN.
_HARMLESS_OWNERS = _words(
    "bos cache cls end eos group image last mask max min next num pad primary pub public sep sort start stop unk"
)
# A name that ends like this is about a secret: TOKEN_FILE, secret_name, password_length.
_ABOUT_A_SECRET = _words(
    "algorithm backend class count dir directory enabled endpoint env error errors expiry field file files folder host"
    " index kind length limit method mode name names parallelism path paths policy ref required size source timeout ttl"
    " type uri url"
)
# Every name of a secret contains one of these. Other names are not examined further.
_SEEDS = _words("key token secret pass pwd cred auth cookie jwt mnemonic dsn webhook pat pw connection")
_MAX_NAME = 100  # characters: longer words are base64 data and would fill the cache


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Return whether the value under this name is a secret, judged by the words of the name."""
    lowered = name.lower()
    if not any(seed in lowered for seed in _SEEDS):
        return False
    name = name.rpartition(".")[2]  # the last part of wandb.api_key; secrets.py is a file
    words = [word.lower() for word in _pattern(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+").findall(name)]
    while len(words) > 1 and words[-1].isdigit():  # API_KEY_2
        words.pop()
    if not words or name in ("PWD", "OLDPWD"):
        return False
    if words[-1] in _ABOUT_A_SECRET and words[-2:] != ["webhook", "url"]:
        return False
    if any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words):
        return True
    pairs = list(pairwise(words))
    if any(owner in _KEY_OWNERS and word in ("key", "keys", "token", "tokens", "string") for owner, word in pairs):
        return True
    owner, last = pairs[-1] if pairs else ("", words[0])
    if last == "auth":
        return owner not in ("use", "no", "require", "enable", "disable", "skip")
    if last in ("token", "pass", "pw", "pat") and not owner:
        return True
    return (
        name.isupper()
        and last in ("key", "token", "pass", "pw", "pat")
        and bool(owner)
        and owner not in _HARMLESS_OWNERS
    )


def _is_secret_value(name: str, value: str) -> bool:
    """Return whether to hide the value of a secret's name: not a switch, number, placeholder or existing file."""
    if not value or value.lower() in _NO_SECRETS or MASK in value:
        return False
    if _pattern(r"\$\{?\w+\}?|\$\(.*|%\w+%|\{[\w.]+\}").fullmatch(value):  # $TOKEN, $(cat file), {token}
        return False
    if _pattern(r"-?[\d.]+").fullmatch(value):  # lengths, ports and indices have fewer digits than a secret
        return (value.isdigit() and len(value) >= 6) or "pass" in name.lower() or "pwd" in name.lower()
    return not (value.startswith(("/", "~", "./")) and os.path.exists(os.path.expanduser(value)))


_NO_SECRETS = _words("true false yes no on off none null 0 1 *** ... … password")

# ---- words of a text: names of secrets, and tokens ----

# These separate a name from its value: NAME=VALUE, name: value, "name": VALUE; _BLANK only follows a flag, as in
# --name VALUE and '--name', 'VALUE' of a list.
_EQUALS = r"""(?:\\*["'])?\]?[^\S\n]{0,20}(?:=>|[=:])(?![=:/])[^\S\n]{0,20}"""
_BLANK = r"""(?:\\*["'])?,? {1,4}(?!-)"""
# A value ends at its closing quote, else at a blank or a comma.
_VALUE = r"""(?m)[bfru]?(?:(?P<quote>\\*["'])(?P<quoted>.*?)(?:(?<!\\)(?P=quote)|$)|(?P<bare>[^\s,;&"'`\\]+))"""
# In text these names often have harmless values: only machine-made ones count.
_AMBIGUOUS = _words(
    "token auth pass pat pw sig signature secrets passwords credentials x-amz-signature x-goog-signature"
)
_MACHINE_MADE = r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=%-]{16,}"
# These follow a name in source code and in sentences: api_key=self.api_key, token: str, password: required.
_CODE = r"[A-Za-z_]\w*(?:\.[a-z_]+)*[(\[].*|(?:self|cls|os|args|config|cfg|settings)\..*|[a-z_]+(?:\.[a-z_]+)+[)\]}.]*"
_SENTENCE = _words(
    "a an any are as bool by can expected for from has in int invalid is it list may missing must needs not of optional"
    " or required see should str string that the to undefined unset was when"
)


def _find_spans_by_words(text: str) -> Iterable[Span]:
    """Yield secrets behind names, and tokens. Examines each distinct word once, because a traceback repeats most words."""
    words = text
    if "\\" in text or "%" in text:  # a word begins behind an escaped line end, and in a URL behind %3D
        words = _pattern(r"\\[nrt]|%[0-9A-Fa-f]{2}").sub(lambda escape: " " * len(escape[0]), text)
    for word in set(_pattern(r"[A-Za-z_][\w.-]*").findall(words)):
        length = _token_length(word) if word.startswith(_PREFIXES) else 0
        if length or (len(word) <= _MAX_NAME and (is_secret_name(word) or word.lower() in _AMBIGUOUS)):
            at = words.find(word)
            while at >= 0:
                end = at + len(word)
                if length:
                    yield at, at + length
                elif _is_whole_word(words, at, end):
                    yield from _find_value_span(word, text, at, end)
                at = words.find(word, end)


def _is_whole_word(text: str, begin: int, end: int) -> bool:
    before, after = text[begin - 1 : begin], text[end : end + 1]
    return not (before.isalnum() or before in ("_", ".") or after.isalnum() or after in ("_", ".", "-"))


def _find_value_span(name: str, text: str, begin: int, end: int) -> Iterable[Span]:
    """Yield the span of the value behind a secret's name, if it is a secret."""
    is_flag = text[max(0, begin - 2) : begin] == "--"
    separator = _pattern(_EQUALS).match(text, end) or (is_flag and _pattern(_BLANK).match(text, end))
    value = _pattern(_VALUE).match(text, separator.end()) if separator else None
    if value:
        group = "quoted" if value["quote"] else "bare"
        word = value[group] if value["quote"] else value[group].rstrip(")]}.:")
        if _is_secret_in_text(name, word, is_flag, is_quoted=bool(value["quote"])):
            yield value.start(group), value.start(group) + len(word)


def _is_secret_in_text(name: str, value: str, is_flag: bool, is_quoted: bool) -> bool:
    """Return whether a value in text is a secret: sentences and source code have the same names."""
    lowered = name.lower()
    if not _is_secret_value(name, value) or lowered.endswith(("authorization", "cookie")):  # _HEADER finds these
        return False
    if lowered in _AMBIGUOUS and not is_flag:
        return _pattern(_MACHINE_MADE).fullmatch(value) is not None
    if is_quoted or name.isupper():
        return True
    return value.lower() not in _SENTENCE and lowered != value and not _pattern(_CODE).fullmatch(value)


# Prefixes of services' tokens with what follows. Tokens with a dash need a digit: sk-learn is a word.
_TOKENS = {
    **dict.fromkeys(
        _words("hf_ wandb_v1_ gsk_ r8_ rpa_ KGAT_ ghp_ ghs_ github_pat_ npm_ sk_live_ whsec_"),
        r"[A-Za-z0-9]{16,}[\w-]*",
    ),
    **dict.fromkeys(_words("sk- xai- nvapi- tgp_v1_ glpat- pypi- xoxb- xoxp-"), r"(?=[A-Za-z_-]*\d)[\w-]{16,}"),
    "AKIA": r"[A-Z0-9]{12,}",  # AWS
    "ASIA": r"[A-Z0-9]{12,}",
    "AIza": r"[\w-]{16,}",  # Google
    "dapi": r"[0-9a-f]{32}",  # Databricks
    "SG.": r"[\w-]{16,}\.[\w-]+",  # SendGrid
    "eyJ": r"[\w-]+\.[\w-]+\.[\w-]+",  # JSON Web Token
}
_PREFIXES = tuple(_TOKENS)


def _token_length(word: str) -> int:
    for prefix, rest in _TOKENS.items():
        if word.startswith(prefix) and (match := _pattern(rest).match(word, len(prefix))):
            return match.end()
    return 0


# ---- shapes ----

# Anyone who knows the rest of such an address can post there.
_ADDRESSES = {
    "hooks.slack.com/services/": r"[\w/]+",
    "/api/webhooks/": r"\d+/[\w-]+",  # Discord
    "api.telegram.org/bot": r"\d+:[\w-]+",
    "ntfy.sh/": r"(?!TOPIC)[\w-]+",
    "ntfy://": r"(?!\S*TOPIC)[^\s\"'`,;<>]+",
}
_USERINFO = r"""://([^\s/?#"'`<>\\]*)@"""
_HEADER = r"""(?i)(?:authorization|cookie)\\*["']?\s{0,3}[:=]\s{0,3}(?:\\*["'])?(?:(?:bearer|basic|token)\s+)?([^"'\r\n\\]+)"""
_BEARER = r"(?i)\bbearer\s+([\w.~+/=-]{20,}|(?=[a-z.-]*\d)[\w.~+/=-]{8,})"
_PRIVATE_KEY = (
    r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"
    r"(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY-----|(?:[A-Za-z0-9+/=\s]|\\[nr])*)"  # the end may be cut off
)


def _find_spans_by_shape(text: str) -> Iterable[Span]:
    if "PRIVATE KEY" in text:
        for match in _pattern(_PRIVATE_KEY).finditer(text):
            yield match.span()
    if "/" in text:
        for begin, rest in _ADDRESSES.items():
            if begin in text:
                for match in _pattern(f"{begin}({rest})").finditer(text):
                    yield match.span(1)
        if "@" in text:
            for match in _pattern(_USERINFO).finditer(text):
                yield from _find_spans_of_userinfo(match[1], match.start(1))
    lowered = text.lower()
    if "authorization" in lowered or "cookie" in lowered:
        for match in _pattern(_HEADER).finditer(text):
            if _is_secret_value("", match[1].strip()):
                yield match.span(1)
    if "bearer" in lowered:
        for match in _pattern(_BEARER).finditer(text):
            yield match.span(1)


def _find_spans_of_userinfo(userinfo: str, begin: int) -> Iterable[Span]:
    """Yield the password of user:PASSWORD@host, and the token of TOKEN@host: user names are shorter."""
    user, colon, password = userinfo.partition(":")
    if len(user) >= 16:
        yield begin, begin + len(user)
    if colon and _is_secret_value("password", password):
        yield begin + len(user) + 1, begin + len(userinfo)


# ---- secrets that this process received ----

_secrets: list[str] | None = None  # longest first


def learn_secrets(variables: Mapping[str, str], argv: Iterable[str] = ()) -> None:
    """Hide the secrets among these variables and arguments from now on, wherever they occur."""
    global _secrets
    secrets: set[str] = set()
    for name, value in variables.items():
        is_whole = is_secret_name(name) and _is_secret_value(name, value)
        secrets.update([value] if is_whole else (value[begin:end] for begin, end in _find_spans(value)))
    words = list(argv)
    for word, spans in zip(words, _find_spans_of_argv(words), strict=True):
        secrets.update(word[begin:end] for begin, end in spans)
    forms = {form for secret in secrets if _is_distinctive(secret) for form in _make_encoded_forms(secret)}
    _secrets = sorted(forms.union(_load_known_secrets()), key=lambda form: (-len(form), form))


def _load_known_secrets() -> list[str]:
    """Return the known secrets: at first those that this process was started with."""
    global _secrets
    if _secrets is None:
        _secrets = []
        learn_secrets(os.environ, sys.argv)
    return _secrets


def _mask_known(text: str) -> str:
    for secret in _load_known_secrets():
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def _is_distinctive(value: str) -> bool:
    """Return whether a value is too long to occur by chance. Dates and times have up to 10 digits."""
    return len(value) >= (12 if value.isdigit() else 8) and len(set(value)) >= 4


def _make_encoded_forms(value: str) -> set[str]:
    """Return the value unchanged, quoted by JSON and by Python, and encoded for a URL."""
    import json

    in_url = "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "-_.~") else f"%{byte:02X}"
        for byte in value.encode("utf-8", "surrogateescape")
    )
    return {value, json.dumps(value)[1:-1], repr(value)[1:-1], in_url, in_url.replace("%2F", "/")}
