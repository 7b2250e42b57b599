"""Right after the tokenizer: which questions and prompts are too long for the stages that will ask them, hours later.
No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.contract.shape import shape
from stoker.contract.untrusted import parse_json
from stoker.speedrun.rows import pair_fault, rows_of
from stoker.training.config.schema import Config
from stoker.training.evaluate.asking import Manner, as_asked
from stoker.training.evaluate.tasks import TOLERATED, prompts_of, read_tasks
from stoker.training.reward.pairs import answered
from stoker.training.tokenizer.tokenizer import Tokenizer, load


@shape
class TooLong:
    what: str
    long: int
    total: int
    longest: int  # tokens, with room for the answer
    config: Config

    def line(self, recipe: str) -> str:
        """With the flags that would make room."""
        context = self.config.data.context_length
        enough = 1 << (self.longest - 1).bit_length()
        flags = f"--set {recipe}:data.context_length={enough}"
        if self.config.batch.tokens % enough:
            flags += f" --set {recipe}:batch.tokens={enough}"
        told = (
            f"{self.long} of {self.total} {self.what} with"
            f" {'both answers' if recipe == 'reward' else 'room for the answer'} are longer"
        )
        told += f" than {context} tokens, the longest has {self.longest}"
        return f"{told}: {flags}"


def too_long(recipe: str, config: Config, tokenizer: str) -> TooLong | None:
    """What the recipe would refuse; fewer are left out there."""
    words = load(tokenizer)
    for what, lengths in _lengths(recipe, config, words):
        long = sum(length > config.data.context_length for length in lengths)
        if long and long >= TOLERATED * len(lengths):
            return TooLong(what, long, len(lengths), max(lengths), config)
    return None


def _lengths(recipe: str, c: Config, words: Tokenizer) -> Sequence[tuple[str, list[int]]]:
    if recipe == "evaluate":
        manner = Manner(c.evaluate.chat, c.evaluate.shots, c.generate.system)
        tasks = read_tasks(c.evaluate.tasks, c.evaluate.most)
        return [
            (
                f"questions of {one.name}",
                [length for _, length in as_asked(one.questions, words, manner, c.generate.new_tokens)],
            )
            for one in tasks
        ]
    if recipe == "reward":
        files = [path for path in (c.reward.pairs, c.reward.held_out) if path]
        return [(f"pairs of {path}", [len(one) + len(other) for one, other in _pairs(path, words)]) for path in files]
    path = c.grpo.prompts if recipe == "grpo" else c.diversity.prompts
    manner = Manner(recipe == "grpo" or c.evaluate.chat, system=c.generate.system)
    asked = as_asked(prompts_of(path, f"{recipe}.prompts").questions, words, manner, c.generate.new_tokens)
    return [(f"prompts of {path}", [length for _, length in asked])]


def _pairs(path: str, words: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Of the rows that are pairs: the others are counted by the stage."""
    for row in (parse_json(line) for _, line, wrong in rows_of(path, pair_fault) if not wrong):
        yield answered(words, row["prompt"], row["chosen"]), answered(words, row["prompt"], row["rejected"])
