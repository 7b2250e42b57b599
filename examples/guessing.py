"""GRPO with several turns: the model guesses a number, and is told whether it is higher or lower.

    stoker train grpo --model.load MODEL --grpo.prompts numbers.jsonl --grpo.rollout examples/guessing.py:rollout

A row: {"secret": 5}. All rollouts of a group guess the same number. The reward is 1 for the first guess, 0.2 less for each
further one, and 0 if it is not found: halving what is left gives 0.71 on average.
"""

from __future__ import annotations

from typing import Any

from stoker.rollout import Client, ContextFull, Rollout

LOWEST, HIGHEST, GUESSES = 1, 7, 3
START = f"Guess my number from {LOWEST} to {HIGHEST}."


async def rollout(client: Client, row: dict[str, Any], seed: int) -> Rollout:
    chat, found, guesses = client.conversation(START), False, 0
    try:
        while guesses < GUESSES and not found:
            guess = (await chat.sample(max_tokens=4)).text.strip()
            guesses += 1
            found = guess == str(row["secret"])
            if not found and guesses < GUESSES:
                chat.add({"role": "user", "content": reply(guess, row["secret"])})
    except ContextFull:
        pass  # what has been said counts as not found
    return chat.rollout(1 - 0.2 * (guesses - 1) if found else 0.0, parts={"found": found, "guesses": guesses})


def reply(guess: str, secret: int) -> str:
    """Return what the game says of a wrong guess."""
    if not guess.isdecimal() or not LOWEST <= int(guess) <= HIGHEST:
        return "not a number"
    return "higher" if secret > int(guess) else "lower"
