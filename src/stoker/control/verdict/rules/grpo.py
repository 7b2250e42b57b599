"""grpo.*: learning from rewards that came to nothing."""

from __future__ import annotations

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.frozen import replace
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, named
from stoker.control.verdict.exit_text import find, last_lines

ORDER = 15
_RESUME = "then start the same command with the same --name: it resumes from the checkpoint that the message names"
_FROM_CHECKPOINT = "--checkpoint.resume PATH   # begins with the weights of the checkpoint that the message names"
_AGAIN = "then start the same command again: no checkpoint was saved, so it starts from the beginning"
NONE_SAVED = "no checkpoint was saved before it"  # the recipe's words (training/loop/keeping.py)
family = Family(__name__, RESUME=_RESUME, FROM_CHECKPOINT=_FROM_CHECKPOINT)


@family.cause("""
grpo.reward: Your reward function failed, so nothing could be learned from the step's answers.
  seen: stoker's own GRPO reported the function's exception, a value that is not a finite number, or that it took longer than
      grpo.reward_timeout, and ended itself
  unless: an exception of the rank's own, or another exit code than 70
  fix: the message names file and line, prompt and answer: call the function with these to see the error
  fix: {RESUME}
  fix: --grpo.reward_timeout 20m   # if it is only slow
""")
def reward(case: Case) -> CauseMatch | None:
    found = find(case, r"GRPO stopped: (reward .+)") if ended_itself(case) else None
    return CauseMatch(found[1].strip(), last_lines(case.end), _fixes("grpo.reward", found[1])) if found else None


@family.cause("""
grpo.rollout: Your rollout function failed, so nothing could be learned from the step.
  seen: stoker's own GRPO reported that all rollouts of a step failed, or that the process they run in died or could not be
      interrupted, and ended itself
  unless: an exception of the rank's own, or another exit code than 70
  fix: the message names file, line and prompt: call the function with that row to see the error
  fix: {RESUME}
  fix: --grpo.rollout_timeout 20m   # if it is only slow
""")
def rollout(case: Case) -> CauseMatch | None:
    found = find(case, r"GRPO stopped: (rollout .+)") if ended_itself(case) else None
    return CauseMatch(found[1].strip(), last_lines(case.end), _fixes("grpo.rollout", found[1])) if found else None


@family.cause("""
grpo.server, again: The server that writes GRPO's answers refused, or did not answer.
  seen: stoker's own GRPO reported the server's status and sentence, or that it did not answer for grpo.server_timeout, and
      ended itself after a checkpoint
  unless: an exception of the rank's own, or another exit code than 70
  fix: if it refused, its message says what to change: the key in STOKER_API_KEY, or --weights-from, which must be a folder
      above the run directory
  fix: is it running? `stoker logs RUN --role NAME` shows what it printed
  fix: --grpo.server_timeout 30m   # if it is only slow, or takes long to be replaced
""")
def server(case: Case) -> CauseMatch | None:
    found = find(case, r"GRPO stopped: (the server at .+)") if ended_itself(case) else None
    return CauseMatch(found[1].strip(), last_lines(case.end)) if found else None


@family.cause("""
grpo.no-signal: GRPO stopped the run: for several steps nothing could be learned from the rewards.
  seen: stoker's own GRPO saw for grpo.breaker_steps steps the same reward for every answer (0, say), the same reward for
      all answers to each prompt, or no right answer at all, and ended itself after a checkpoint
  unless: an exception, or another exit code than 70: the run did not end itself
  fix: stoker rollouts   # the answers and their rewards
  fix: use prompts that the model sometimes answers correctly; a longer sft; a higher grpo.group
  fix: a higher generate.temperature if the answers to a prompt are nearly the same text; a higher generate.new_tokens if
      many are cut
  fix: a reward of your own that is always 0? call it with a prompt and an answer of rollouts.jsonl; does a server or a
      file it needs still answer?
""")
def no_signal(case: Case) -> CauseMatch | None:
    return _stopped(
        case,
        "(?:the reward was exactly|all answers to a prompt had the same reward|no answer was right|.+ paid for no answer).+",
    )


@family.cause("""
grpo.identical: GRPO stopped the run: all answers to a prompt were the same text, for every prompt, for several steps.
  seen: stoker's own GRPO compared the answers of each group for grpo.breaker_steps steps, and ended itself after a checkpoint
  unless: an exception, or another exit code than 70; every answer right: that run is complete
  fix: a higher generate.temperature; a higher grpo.kl or a lower optim.learning_rate from an earlier checkpoint
  fix: stoker rollouts   # shows since which step
""")
def identical(case: Case) -> CauseMatch | None:
    return _stopped(case, "all answers to a prompt were the same text.+")


@family.cause("""
grpo.cut: GRPO stopped the run: too many answers were cut at the token limit for several steps.
  seen: stoker's own GRPO counted grpo.breaker_cut of the answers or more cut at generate.new_tokens for grpo.breaker_steps
      steps, and no fewer at the end, and ended itself after a checkpoint
  unless: an exception, or another exit code than 70
  fix: a higher generate.new_tokens (and data.context_length, which holds prompt and answer)
  fix: a model that ends its answers: stage sft, and its own chat template
  fix: --grpo.reward length=0.1   # or a reward for short answers
""")
def cut(case: Case) -> CauseMatch | None:
    return _stopped(case, r".+ cut at generate\.new_tokens.+")


@family.cause("""
grpo.other-weights: GRPO stopped the run: the server that writes the answers has other weights than the trainers.
  seen: the server's answers carried the digest of weights that the trainers never published, again after these were pushed;
      or its log-probabilities of a test prompt differed from the trainers'; and they ended the run after a checkpoint
  unless: an exception, or another exit code than 70; a server that does not answer at all
  fix: does the server serve the model that the trainers began with, and the same tokenizer?
  fix: does it load what they publish? its log shows when it last loaded new weights: `stoker logs RUN --role NAME`
""")
def other_weights(case: Case) -> CauseMatch | None:
    return _stopped(case, "the server at .+ answers with other weights.+")


@family.cause("""
grpo.broken: GRPO's stop rules ended the run: training was damaging the model.
  seen: stoker's own GRPO saw for several steps a divergence, entropy or length out of bounds, or non-finite numbers, and
      ended itself
  unless: an exception, or another exit code than 70: the run did not end itself
  fix: the message says what to change; metrics.jsonl has each step's reward, kl, entropy and length
  fix: a lower optim.learning_rate and a higher grpo.kl
  fix: {FROM_CHECKPOINT}
  fix: look at prompts and answers: `stoker rollouts`, and `stoker chat` with the model it began with
""")
def broken(case: Case) -> CauseMatch | None:
    found = _stopped(case, ".+")
    return None if found is None else replace(found, fix=_fixes("grpo.broken", found.summary))


def _fixes(cause: str, line: str) -> tuple[str, ...]:
    """The catalogue's, where a checkpoint was saved; else without what needs one."""
    if NONE_SAVED not in line:
        return named(cause).fix
    known = {_RESUME: _AGAIN, _FROM_CHECKPOINT: ""}
    return tuple(filter(None, (known.get(fix, fix) for fix in named(cause).fix)))


def _stopped(case: Case, line: str) -> CauseMatch | None:
    found = find(case, f"GRPO stopped itself: ({line})") if ended_itself(case) else None
    return CauseMatch(found[1].strip(), last_lines(case.end)) if found else None


def ended_itself(case: Case) -> bool:
    return case.end.error is None and case.end.code == EX_SOFTWARE
