"""Group-relative policy optimisation. train.max_steps counts batches of answers."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from stoker.contract import limits
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import choice, text_option
from stoker.contract.units import parse_duration

STALE_CAP = 2.0  # of importance weights, where answers are of older weights and nobody gave one
AUTO, IN_FOLDER, MEMORY, GROUP = "auto", "folder", "memory", "group"  # grpo.publish
MICRO = 16  # answers a rank learns from at once, where batch.micro is auto


def names_code(rewards: Sequence[str]) -> bool:
    """Whether one of these may be a function in a file, however its weight is cut off."""
    return any(".py" in text.partition(":")[0] for text in ([rewards] if isinstance(rewards, str) else rewards))


def reaches_elsewhere(servers: str) -> bool:
    """Whether one of these is not on this machine: it gets the API key and the prompts."""
    return "://" in servers and not all(_is_here(url.strip()) for url in servers.split(","))


def _is_here(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@frozen
class GrpoConfig:
    prompts: str = text_option("PATH")(
        "jsonl rows with prompt (a text, or messages) and answer, or GSM8K's; --data names it, too"
    )
    weights: str = text_option("PATH")(
        "how often each prompt is sampled: weights.jsonl of the density stage (empty: all equally often)"
    )
    reward: tuple[str, ...] = option(
        "rewards, added up: exact (the default), number, math, regex:…, format:…, length, model,"
        " FILE.py:FUNCTION; each may have =WEIGHT",
        "REWARD",
        default=(),
        many=True,
    )
    reward_timeout: float = limits.POSITIVE(
        "your own reward fails if it takes longer than this for a step's answers",
        300.0,
        parse=parse_duration,
        metavar="TIME",
    )
    rollout: str = text_option("FILE.py:FUNCTION")(
        "an async function of your own that makes each rollout: several turns, tools, environments (empty: one answer to each"
        " prompt)"
    )
    rollout_timeout: float = limits.POSITIVE(
        "a rollout whose own code (not the sampling) takes longer than this is left out of the step",
        300.0,
        parse=parse_duration,
        metavar="TIME",
    )
    reward_model: str = text_option("DIR")("folder of the reward stage's model (empty: none)")
    reward_weight: float = limits.NOT_NEGATIVE("how much the reward model's score adds to a right answer's 1", 0.1)
    prompts_per_step: int = limits.FROM_ONE("prompts a step, all ranks together", 32)
    group: int = limits.FROM_TWO("answers per prompt", 8)
    updates: int = limits.FROM_ONE("optimizer steps per batch of answers", 1)
    clip_ratio: float = limits.POSITIVE("clips the ratio of new to old probability to 1 ± this", 0.2)
    clip_ratio_high: float = limits.NOT_NEGATIVE(
        "clips it to 1 + this for answers better than the others: rare tokens may grow faster (0: clip_ratio)", 0.0
    )
    importance_cap: float = limits.NOT_NEGATIVE(
        "weights tokens by their probability here over that where they were sampled, at most this, e.g. 2 (0: all weigh 1)",
        0.0,
    )
    server: str = text_option("URL")(
        "who writes the answers: a `stoker serve` with --weights-from, several separated by commas, or a role of the job (empty: the"
        " trainers); its key or token in STOKER_API_KEY"
    )
    server_kind: str = choice("stoker", "sglang", "vllm")(
        "what grpo.server is: `stoker serve`; sglang, which loads what the trainers publish; vllm, which takes adapters (--lora)"
    )
    server_timeout: float = limits.POSITIVE(
        "the run fails if a server does not answer for this long", 600.0, parse=parse_duration, metavar="TIME"
    )
    publish: str = choice(AUTO, IN_FOLDER, MEMORY, GROUP)(
        "how new weights reach grpo.server: a folder of the run directory; shared memory of this machine, where there is room;"
        " a process group with the servers, also of other machines; auto: memory where the servers see it, else folder"
    )
    staleness: int = limits.Range(0, 64)(
        "with a server: answers may come from weights this many steps old, written while the trainers learn (0: none)",
        0,
    )
    resample: int = limits.COUNT(
        "up to this many times a step, replace groups whose answers all have the same reward by other prompts (0: never)",
        0,
    )
    kl: float = limits.NOT_NEGATIVE("weight of the KL to the first model", 0.02)
    scale_by_deviation: bool = option("advantages are divided by the group's standard deviation", default=True)
    rollouts_mb: int = limits.Range(0, 512)(
        "about how many MB rollouts.jsonl may have: prompts, answers and rewards of rank 0, of fewer steps as it grows (0: none)",
        64,
    )
    breaker_steps: int = limits.COUNT(
        "stop after this many steps of a constant reward, of identical answers, with no answer right, or with too many cut;"
        " after as many with all answers right it ends as done (0: never)",
        10,
    )
    breaker_cut: float = limits.FRACTION(
        "stop if this share of the answers or more stays cut at generate.new_tokens (0: never)", 0.95
    )
    breaker_kl: float = limits.NOT_NEGATIVE("stop if the divergence stays above this", 10.0)
    breaker_entropy: float = limits.NOT_NEGATIVE("stop if the entropy per token stays below this", 0.001)
    breaker_length: float = limits.FRACTION(
        "stop if answers stay shorter than this share of those at the beginning", 0.1
    )

    @property
    def weight_cap(self) -> float:
        """grpo.importance_cap; answers of older weights always have one."""
        return self.importance_cap or (STALE_CAP if self.staleness else 0.0)
