"""grpo.*: learning from rewards that came to nothing."""

from __future__ import annotations

from stoker.contract.names import EX_SOFTWARE
from stoker.control.verdict.catalogue import Case, Family, Found
from stoker.control.verdict.lastwords import find, last_lines

ORDER = 15
family = Family(__name__)

_SAID = r"GRPO stopped itself: (.+)"


@family.cause("""
grpo.reward: A reward function of the user's failed, so nothing could be learned from the step's answers.
  seen: stoker's own GRPO reported the function's exception, a value that is no finite number, or that it took longer than
      grpo.reward_timeout, and ended itself
  unless: an exception of the rank's own, or another exit code than 70
  fix: the line has the file, the line in it, and the prompt and answer it was called with: call the function with these
  fix: the last step's weights are saved; the same command resumes from them
  fix: --grpo.reward_timeout 20m   # where it is only slow
""")
def reward(case: Case) -> Found | None:
    found = find(case, r"GRPO stopped: (reward .+)") if ended_itself(case) else None
    return Found(found[1].strip(), last_lines(case.end)) if found else None


@family.cause("""
grpo.broken: GRPO's circuit breaker stopped the run: it learned nothing any more, or was breaking its model.
  seen: stoker's own GRPO saw for several steps a constant reward, a divergence, entropy or length out of bounds, or
      no numbers at all, and ended itself
  unless: an exception, or another exit code than 70: the run did not end itself
  fix: the line says what to change; metrics.jsonl has each step's reward, kl, entropy and length
  fix: a lower optim.learning_rate and a higher grpo.kl; where the line names a checkpoint, checkpoint.resume goes on
      from it
  fix: look at what is asked and what is answered: `stoker chat` with the model it began with
""")
def broken(case: Case) -> Found | None:
    found = find(case, _SAID) if ended_itself(case) else None
    return Found(found[1].strip(), last_lines(case.end)) if found else None


def ended_itself(case: Case) -> bool:
    return case.end.error is None and case.end.code == EX_SOFTWARE
