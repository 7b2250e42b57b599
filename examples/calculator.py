"""GRPO with a tool: the model may call a calculator before it answers.

    stoker train grpo --model.load MODEL --grpo.prompts sums.jsonl --grpo.rollout examples/calculator.py:rollout

A row: {"prompt": "37*46?", "answer": "1702"}. The assistant calls the tool with `calc 37*46`, a tool message with the result
follows, and what the assistant says next is its answer. Only the assistant's tokens are learned.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from stoker.rollout import Client, ContextFull, Rollout

CALLS = 2  # of the tool, in one rollout
SECONDS, MEGABYTES = 2, 256  # of a call
PROCESSES = asyncio.Semaphore(os.cpu_count() or 1)  # at once, of all rollouts of this rank

# The tool is a process of its own with limits on time and memory, so that 9**9**9 costs two seconds and no more. That is no
# sandbox: it runs as you, and can read your files.
CALCULATOR = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEGABYTES << 20}, {MEGABYTES << 20}))
text = sys.argv[1]
assert len(text) <= 100 and not set(text) - set("0123456789+-*/(). ")
print(str(eval(text, {{"__builtins__": {{}}}}))[:100])
"""


async def calculate(text: str) -> str:
    """Return the value of an expression, or `error`."""
    async with PROCESSES:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", CALCULATOR, text,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), SECONDS + 5)
        except TimeoutError:
            return "error"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return output.decode().strip() if process.returncode == 0 else "error"


async def rollout(client: Client, row: dict[str, Any], seed: int) -> Rollout:
    chat = client.conversation(row["prompt"])
    calls, answer = 0, ""
    try:
        while True:
            answer = (await chat.sample(max_tokens=24)).text.strip()
            if not answer.startswith("calc ") or calls == CALLS:
                break
            calls += 1
            chat.add({"role": "tool", "content": await calculate(answer.removeprefix("calc "))})
    except ContextFull:
        answer = ""
    return chat.rollout(float(answer == row["answer"]), parts={"calls": calls})
