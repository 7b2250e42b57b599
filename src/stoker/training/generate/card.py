"""README.md beside an exported model: what it was trained on, with which settings, and how far. From the run directory."""

from __future__ import annotations

import os

from stoker import __version__
from stoker.contract import redact
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.untrusted import printable, read_text
from stoker.contract.yamltext import NotYaml, parse_yaml
from stoker.control.record.metrics import metrics_in
from stoker.training.model.hf_write import CARD_MARK

SETTINGS = "config.yaml"
_NUMBERS = ("step", "loss", "val_loss", "val_bits_per_byte", "val_right", "reward", "tokens")
_TOLD = ("model.load", "data.path", "data.validation", "grpo.prompts", "reward.pairs", "dpo.pairs", "tokenizer.path")


def card_of(run: str, stage: str = "") -> str:
    """Empty where the run has no settings: it was no `stoker train`."""
    path = os.path.join(run, SETTINGS)
    if not os.path.isfile(path):
        return ""
    try:
        text = read_text(path)
        told = parse_yaml(text)
    except (OSError, NotYaml, ValueError) as problem:
        raise Refusal(f"{path} can't be read: {getattr(problem, 'strerror', None) or problem}", EX_DATAERR) from problem
    rows = [f"| {key} | {shown} |" for key in _TOLD if (shown := _shown(told, key))]
    numbers: dict[str, object] = {}
    for line in metrics_in(run):
        numbers |= {key: line[key] for key in _NUMBERS if isinstance(line.get(key), (int, float))}
    results = [f"| {key} | {value} |" for key, value in numbers.items()]
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- stoker\n---",
        CARD_MARK,
        f"# {printable(os.path.basename(os.path.abspath(run)))}",
        f"Trained with Stoker {__version__}{f', stage {stage}' if stage else ''}.",
        "## Data\n\n| | |\n|---|---|\n" + "\n".join(rows) if rows else "",
        "## Result\n\n| | at the last step that measured it |\n|---|---|\n" + "\n".join(results) if results else "",
        "## Settings\n\n```yaml\n" + text.replace("```", "` ` `").strip() + "\n```",
    ]
    return redact.whole("\n\n".join(filter(None, parts))) + "\n"


def _shown(told: object, key: str) -> str:
    for name in key.split("."):
        told = told.get(name) if isinstance(told, dict) else None
    values = told if isinstance(told, list) else [told]
    return ", ".join(printable(str(value), 200).replace("|", "\\|") for value in values if value not in (None, ""))
