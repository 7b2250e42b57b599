"""What was asked for: config file < environment < flags. Each value is read here and knows its origin."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.contract.errors import EX_CONFIG, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.safe_io import why_shared
from stoker.training.config import aliases
from stoker.training.config.files import load, shipped
from stoker.training.config.flags import Flag
from stoker.training.config.keys import KEYS
from stoker.training.config.schema import SECTIONS
from stoker.training.rl.config import names_code, reaches_elsewhere

PREFIX = "STOKER_TRAIN_"
# Values that let code run, or send the API key and the prompts to another machine: taken from flags, variables and the
# user's own config file, not from one that somebody else wrote.
ONLY_IN_OWN_FILE: dict[str, Callable[[Any], bool]] = {
    "model.trust_remote_code": bool, "grpo.server": reaches_elsewhere, "grpo.reward": names_code,
    "grpo.rollout": bool,
}  # fmt: skip
_HUB_CACHE = re.compile(r"/(?:models|datasets|spaces)--[^/]+/(?:snapshots|blobs)/")


@frozen
class Origin:
    words: str  # for people: `--learning-rate`, `config file a.yaml: optim.learning_rate`
    code: int  # the exit code of a refusal because of it


class Layer:
    """One place where keys were given. `values` may also hold aliases.PRESET and aliases.GPU."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def take(self, name: str, value: Any, origin: Origin) -> bool:
        """False if nobody knows the name."""
        try:
            found = {name: str(value)} if name == aliases.PRESET else aliases.meaning(name, value)
        except ValueError as problem:
            raise Refusal(f"{origin.words}: {problem}", origin.code) from problem
        self.values |= found or {}
        self.origins |= dict.fromkeys(found or {}, origin)
        return found is not None


@frozen
class Layers:
    file: Layer
    environment: Layer
    flags: Layer
    run: Mapping[str, Any]  # the file's section `run`, as it stands there
    path: str  # of the file; empty: none

    @property
    def all(self) -> tuple[Layer, Layer, Layer]:
        return self.file, self.environment, self.flags

    def told(self, name: str) -> tuple[Any, Origin] | None:
        """The value that wins, if it was given at all."""
        return next(
            ((layer.values[name], layer.origins[name]) for layer in reversed(self.all) if name in layer.values), None
        )


def gather(flags: Sequence[Flag], environment: Mapping[str, str]) -> Layers:
    files = [flag for flag in flags if flag.name == "config"]
    if len(files) > 1:
        raise Refusal(f"--config {files[-1].text}: one config file, and {files[0].text} was named before", EX_USAGE)
    path = files[0].text if files else ""
    file, run = from_file(path) if path else (Layer(), {})
    layers = Layers(file, from_environment(environment), from_flags(flags), run, path)
    _refuse_from_foreign_file(layers)
    return layers


def _refuse_from_foreign_file(layers: Layers) -> None:
    """Raise Refusal where a value in ONLY_IN_OWN_FILE counts that stands in a config file which is not the user's own."""
    given = layers.environment.values.keys() | layers.flags.values.keys()
    for dotted, is_harmful in ONLY_IN_OWN_FILE.items():
        if dotted in given or not is_harmful(layers.file.values.get(dotted, KEYS[dotted].default)):
            continue
        if why := _why_not_own(layers.path):
            origin = layers.file.origins[dotted]
            line = f"{origin.words} is taken only from a config file of your own, and this one is not: it {why}"
            raise Refusal(f"{line}; copy the file, or give --{dotted}", origin.code)


def _why_not_own(path: str) -> str:
    """Return why a config file may be somebody else's; empty if it is the user's own."""
    if path in shipped():
        return "comes with Stoker"
    if _HUB_CACHE.search(os.path.realpath(path)):
        return "was downloaded from the hub"
    return why_shared(path).removeprefix("it ")


def from_flags(flags: Sequence[Flag]) -> Layer:
    found = Layer()
    paths: dict[str, tuple[str, ...]] = {}
    _refuse_opposite_switches(flags)
    for flag in flags:
        dotted = aliases.SECTION_VALUES.get(flag.name, flag.name)
        value: Any = flag.text
        if dotted in KEYS and KEYS[dotted].spec.many:  # given again it adds
            paths[dotted] = value = (*paths.get(dotted, ()), flag.text)
        if flag.name != "config":
            known = found.take(flag.name, value, Origin(flag.spelling, EX_USAGE))
            assert known, f"a flag is registered that no key has: {flag.spelling}"
    return found


def _refuse_opposite_switches(flags: Sequence[Flag]) -> None:
    """`--lora --qlora`: the last one would win, and nobody would know. The same flag given twice is no contradiction."""
    chosen: dict[str, tuple[Any, str]] = {}
    for flag in flags:
        if flag.name not in aliases.SWITCHES or flag.text != "true":
            continue
        for dotted, value in aliases.TRANSLATED[flag.name](flag.text).items():
            before, spelling = chosen.setdefault(dotted, (value, flag.spelling))
            if before != value:
                both = f"{spelling} and {flag.spelling} exclude each other: {dotted} is {before} or {value}"
                together = f"; for both: --{dotted} {before},{value}" if dotted == "train.log_to" else ""
                raise Refusal(f"{both}{together}", EX_USAGE)


def from_environment(environment: Mapping[str, str]) -> Layer:
    """STOKER_TRAIN_OPTIM_LEARNING_RATE=1e-4, STOKER_TRAIN_PRESET=small. Several paths are separated by commas."""
    known = {PREFIX + dotted.replace(".", "_").upper(): dotted for dotted in KEYS} | {PREFIX + "PRESET": aliases.PRESET}
    found = Layer()
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            raise Refusal(f"unknown variable {name}{suggest(name, known)}", EX_CONFIG)
        dotted = known[name]
        many = dotted in KEYS and KEYS[dotted].spec.many
        found.take(dotted, [part for part in text.split(",") if part] if many else text, Origin(name, EX_CONFIG))
    return found


def from_file(path: str) -> tuple[Layer, Mapping[str, Any]]:
    """The keys, and the section `run`."""
    where = f"config file {path}"
    found = Layer()
    run: Mapping[str, Any] = {}

    def take(shown: str, name: str, value: Any, section: str) -> None:
        before = dict(found.values)
        origin = Origin(f"{where}: {shown}", EX_CONFIG)
        if not found.take(name, value, origin):
            raise Refusal(f"{where}: unknown key {shown!r}{aliases.near(section, name)}", EX_CONFIG)
        twice = next((dotted for dotted in before if before[dotted] != found.values[dotted]), None)
        if twice:
            now, then = found.values[twice], before[twice]
            raise Refusal(f"{where}: {shown} says {twice} is {now!r}, and it was {then!r} before", EX_CONFIG)

    for key, value in load(path).items():
        name = str(key).replace("-", "_")
        if value is None:  # a key with nothing behind it is not given
            continue
        if name == "run":
            if not isinstance(value, dict):
                raise Refusal(f"{where}: run holds {value!r}, not options of `stoker run`", EX_CONFIG)
            run = value
        elif isinstance(value, dict) and (name in SECTIONS or name in aliases.NOTES_SECTIONS):
            for inner, one in value.items():
                if one is None:
                    continue
                leaf = str(inner).replace("-", "_")
                meant = aliases.in_section(name, leaf)
                if meant is None:
                    raise Refusal(f"{where}: unknown key {f'{key}.{inner}'!r}{aliases.near(name, leaf)}", EX_CONFIG)
                take(f"{key}.{inner}", meant, one, name)
        elif isinstance(value, dict) and name not in KEYS and name not in aliases.names():
            raise Refusal(
                f"{where}: unknown section {str(key)!r}{suggest(name, [*SECTIONS, *aliases.NOTES_SECTIONS, 'run'])}",
                EX_CONFIG,
            )
        else:
            section, _, leaf = name.rpartition(".")
            take(str(key), (section and aliases.in_section(section, leaf)) or name, value, "")
    return found, run
