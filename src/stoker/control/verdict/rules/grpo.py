"""Causes grpo.*: GRPO stopped the run because nothing useful could be learned."""

from __future__ import annotations

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.frozen import replace
from stoker.control.verdict.catalogue import Case, CauseMatch, Family, get_cause
from stoker.control.verdict.exit_text import find_in_output, last_lines

ORDER = 15
_RESUME = "then start the same command with the same --name: it resumes from the checkpoint that the message names"
_FROM_CHECKPOINT = "--checkpoint.resume PATH   # starts with the weights of the checkpoint that the message names"
_AGAIN = "then start the same command again: no checkpoint was saved, so it starts from the beginning"
NONE_SAVED = "no checkpoint was saved before it"  # the recipe's message (training/loop/keeping.py)
family = Family(__name__, RESUME=_RESUME, FROM_CHECKPOINT=_FROM_CHECKPOINT)


@family.cause("""
grpo.reward: Your reward function failed, so nothing could be learned from the step's completions.
  seen: stoker's own GRPO reported the function's exception, a value that is not a finite number, or that it took longer than
      grpo.reward_timeout, and ended itself
  unless: an exception of the rank's own, or an exit code other than 70
  fix: the message names file and line, prompt and completion: call the function with these to see the error
  fix: {RESUME}
  fix: --grpo.reward_timeout 20m   # if it is only slow
""")
def match_reward(case: Case) -> CauseMatch | None:
    return _match_failure(case, "reward .+", "grpo.reward")


@family.cause("""
grpo.rollout: Your rollout function failed, so nothing could be learned from the step.
  seen: stoker's own GRPO reported that all rollouts of a step failed, or that the process they run in died or could not be
      interrupted, and ended itself
  unless: an exception of the rank's own, or an exit code other than 70
  fix: the message names file, line and prompt: call the function with that row to see the error
  fix: {RESUME}
  fix: --grpo.rollout_timeout 20m   # if it is only slow
""")
def match_rollout(case: Case) -> CauseMatch | None:
    return _match_failure(case, "rollout .+", "grpo.rollout")


@family.cause("""
grpo.server, again: The rollout server refused a request or did not respond.
  seen: stoker's own GRPO reported the server's status and message, or that it did not respond for grpo.server_timeout, and
      ended itself after a checkpoint
  unless: an exception of the rank's own, or an exit code other than 70
  fix: if it refused, its message says what to change: the key in STOKER_API_KEY, or --weights-from, which must be a folder
      above the run directory
  fix: is it running? `stoker logs RUN --role NAME` shows what it printed
  fix: --grpo.server_timeout 30m   # if it is only slow, or takes long to be replaced
""")
def match_server(case: Case) -> CauseMatch | None:
    return _match_failure(case, "the server at .+", "")


@family.cause("""
grpo.no-signal: GRPO stopped the run: for several steps nothing could be learned from the rewards.
  seen: for grpo.breaker_steps steps stoker's own GRPO saw the same reward for every completion (0, say), the same reward for
      all completions of each prompt, or no correct completion at all, and ended itself after a checkpoint
  unless: an exception, or an exit code other than 70: the run did not end itself
  fix: stoker rollouts   # the completions and their rewards
  fix: use prompts that the model sometimes answers correctly; a longer sft; a higher grpo.group
  fix: a higher generate.temperature if the completions of a prompt are nearly the same text; a higher generate.new_tokens if
      many are truncated
  fix: is your own reward always 0? call it with a prompt and a completion of rollouts.jsonl; does a server or a
      file it needs still work?
""")
def match_no_signal(case: Case) -> CauseMatch | None:
    return _match_stop(
        case,
        "(?:the reward was exactly|all answers to a prompt had the same reward|no answer was right|.+ paid for no answer).+",
    )


@family.cause("""
grpo.identical: GRPO stopped the run: for several steps all completions of a prompt were the same text, for every prompt.
  seen: stoker's own GRPO compared the completions of each group for grpo.breaker_steps steps, and ended itself after a
      checkpoint
  unless: an exception, or an exit code other than 70; every completion correct: that run is complete
  fix: a higher generate.temperature; a higher grpo.kl or a lower optim.learning_rate from an earlier checkpoint
  fix: stoker rollouts   # shows since which step
""")
def match_identical(case: Case) -> CauseMatch | None:
    return _match_stop(case, "all answers to a prompt were the same text.+")


@family.cause("""
grpo.cut: GRPO stopped the run: for several steps too many completions were truncated at the token limit.
  seen: for grpo.breaker_steps steps the share of completions truncated at generate.new_tokens was at least grpo.breaker_cut,
      and no smaller at the end; stoker's own GRPO ended itself after a checkpoint
  unless: an exception, or an exit code other than 70
  fix: a higher generate.new_tokens (and data.context_length, which holds prompt and completion)
  fix: a model that ends its completions: stage sft, and its own chat template
  fix: --grpo.reward length=0.1   # or another reward for short completions
""")
def match_truncated(case: Case) -> CauseMatch | None:
    return _match_stop(case, r".+ cut at generate\.new_tokens.+")


@family.cause("""
grpo.other-weights: GRPO stopped the run: the rollout server has other weights than the trainers.
  seen: the server's completions carried the digest of weights that the trainers never published, again after these were
      pushed; or its log-probabilities for a test prompt differed from the trainers'; and they ended the run after a checkpoint
  unless: an exception, or an exit code other than 70; a server that does not respond at all
  fix: does the server serve the model that the trainers started with, and the same tokenizer?
  fix: does it load what they publish? its log shows when it last loaded new weights: `stoker logs RUN --role NAME`
""")
def match_other_weights(case: Case) -> CauseMatch | None:
    return _match_stop(case, "the server at .+ answers with other weights.+")


@family.cause("""
grpo.broken: GRPO's stop rules ended the run: training was damaging the model.
  seen: for several steps stoker's own GRPO saw a KL divergence, entropy or length out of bounds, or non-finite numbers, and
      ended itself
  unless: an exception, or an exit code other than 70: the run did not end itself
  fix: the message says what to change; metrics.jsonl has each step's reward, kl, entropy and length
  fix: a lower optim.learning_rate and a higher grpo.kl
  fix: {FROM_CHECKPOINT}
  fix: look at prompts and completions: `stoker rollouts`, and `stoker chat` with the model it started with
""")
def match_broken(case: Case) -> CauseMatch | None:
    match = _match_stop(case, ".+")
    return None if match is None else replace(match, fix=_choose_fixes("grpo.broken", match.summary))


def _choose_fixes(cause_id: str, message: str) -> tuple[str, ...]:
    """Return the cause's fixes. If no checkpoint was saved, leave out those that need one."""
    fixes = get_cause(cause_id).fix
    if NONE_SAVED not in message:
        return fixes
    replacements = {_RESUME: _AGAIN, _FROM_CHECKPOINT: ""}
    return tuple(filter(None, (replacements.get(fix, fix) for fix in fixes)))


def _match_failure(case: Case, message: str, cause_id: str) -> CauseMatch | None:
    """Match GRPO's message that a function or server failed. `cause_id` is the cause whose fixes depend on the message, or ""."""
    match = find_in_output(case, f"GRPO stopped: ({message})") if ended_itself(case) else None
    if match is None:
        return None
    return CauseMatch(match[1].strip(), last_lines(case.end), _choose_fixes(cause_id, match[1]) if cause_id else ())


def _match_stop(case: Case, message: str) -> CauseMatch | None:
    """Match the message of one of GRPO's stop rules."""
    match = find_in_output(case, f"GRPO stopped itself: ({message})") if ended_itself(case) else None
    return CauseMatch(match[1].strip(), last_lines(case.end)) if match else None


def ended_itself(case: Case) -> bool:
    return case.end.error is None and case.end.code == EX_SOFTWARE
