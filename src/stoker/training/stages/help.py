"""The default of every key as `stoker train STAGE --help` prints it: what a run of that stage resolves, or the rule."""

from __future__ import annotations

from stoker.training.config.derived import RATES, Learning, rule, rule_with_adapters, rule_with_model
from stoker.training.config.flags import shown_value
from stoker.training.config.keys import KEYS, values_of
from stoker.training.config.schema import Config
from stoker.training.fit.footprint import STAGES as PLANNED_STAGES
from stoker.training.stages.registry import STAGES
from stoker.training.stages.run_plan import PLANNED_KEYS

_OF_LOADING = (
    "load",
    "engine",
    "trust_remote_code",
    "vocab_size",
    "dropout",
)  # keys of `model` that count where one is loaded


def default_text(stage: str, dotted: str, config: Config, *, gpus: bool) -> str:
    """Return "default: VALUE" or "derived: RULE" for a key; empty where there is none. `config`: the stage's defaults with its
    preset. `gpus`: the run uses GPUs."""
    kind, key, value = STAGES[stage], KEYS[dotted], values_of(config)[dotted]
    default = shown_value(dotted, value)
    loads = "model.load" in kind.inputs
    if loads and (_is_of_model(dotted) or key.section == "tokenizer"):
        return "derived: from model.load"
    learning = kind.learning
    if isinstance(learning, Learning):
        if always := rule(dotted, learning, config):
            return f"derived: {always}"
        loaded = rule_with_model(dotted, learning, config)
        if loaded and loads:
            return f"derived: {loaded}"
        notes = [f"with model.load {loaded}" if loaded else ""]
        if adapted := rule_with_adapters(dotted, learning, config):
            notes.append(f"with adapters {adapted}")
        if dotted == RATES[1] and (learning.rate or config.model.load):
            notes.append("with optim.kind muon the AdamW rate times the root of the width")
        if gpus and stage in PLANNED_STAGES and dotted in PLANNED_KEYS:
            if dotted == "batch.micro" and loads:
                return "derived: by the memory plan"
            notes.append("of a loaded model the memory plan may change it" if dotted != "parallel.strategy" else "")
        if any(notes):
            return f"default: {default}; derived: {'; '.join(filter(None, notes))}"
    return "" if default == "none" else f"default: {default}"


def _is_of_model(dotted: str) -> bool:
    """Return whether a loaded model's folder decides this key."""
    key = KEYS[dotted]
    return key.section == "model" and key.name not in _OF_LOADING
