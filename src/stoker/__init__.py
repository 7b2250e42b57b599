"""Stoker: trains LLMs on whatever GPUs there are.

In a training script, four words, all of them no-ops outside a run:
    stoker.beat(step=..., loss=..., tokens=...)   stoker.mark("POST-MODEL")   stoker.phase("eval")   stoker.resume()
"""

from stoker.control.rank.words import beat, mark, phase, resume

__version__ = "0.1.0"
__all__ = ["__version__", "beat", "mark", "phase", "resume"]
