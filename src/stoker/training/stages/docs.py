"""docs/config.yaml, made from the keys themselves:   python -m stoker.training.stages.docs > docs/config.yaml"""

from __future__ import annotations

import textwrap

from stoker.training.config import presets
from stoker.training.config.derived import about
from stoker.training.config.keys import DEFAULTS, KEYS, scalar
from stoker.training.config.schema import ABOUT
from stoker.training.stages.registry import learning

_HEAD = """# Every key of `stoker train`, with its meaning and its default.
# Made from the code by `python -m stoker.training.stages.docs`; a test keeps it current.
#
# This is a config file: `stoker train pretrain --config config.yaml` reads it, or JSON with the same keys, // and /* */ comments allowed.
# Keep the lines you change and delete the rest: a key that is not given comes from the stage or the preset.
#
# Later wins: preset < the stage's defaults < config file < environment (STOKER_TRAIN_OPTIM_LEARNING_RATE=1e-4) < flags (--optim.learning_rate 1e-4).
# A key whose name is clear without its section may be written bare: `max_steps: 10` at the top of a file, --max-steps 10.
# The stage's defaults follow from the model's size and the amount of data; every start prints them (`stoker docs pipeline`, "Defaults").
# Setting epochs overrides max_steps, warmup_ratio overrides warmup_steps, accumulation overrides tokens, unless both are set in the same place.
# Other names that work: batch_size (batch.micro), grad_accum_nums (batch.accumulation), lr, n_layers, use_amp (compute.dtype auto or fp32),
# warmup (steps, or a share below 1), device_id (--gpu), and the sections system, training and optimizer.
# A section `run` may hold options of `stoker run`: `run: {nproc_per_node: 4, max_restarts: 3}`.
#
# preset: where to begin
"""


def page() -> str:
    parts = [_HEAD + "".join(f"#   {name:<11}{text}\n" for name, text in presets.ABOUT.items()) + "# preset: small\n"]
    section = ""
    for name, key in KEYS.items():
        if key.section != section:
            section = key.section
            parts.append(f"\n# {ABOUT[section]}\n{section}:\n")
        says = [key.spec.help]
        if key.spec.choices:
            says.append("choices: " + ", ".join(key.spec.choices))
        if differs := presets.differing(name):
            says.append("presets: " + differs)
        if derived := about(name, learning()):
            says.append("stages: " + derived)
        for text in says:
            parts += [f"  # {line}\n" for line in textwrap.wrap(text, 140)]
        parts.append(f"  {key.name}: {scalar(name, DEFAULTS[name])}\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
