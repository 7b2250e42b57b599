"""GRPO whose answers come from servers that speak as sglang and vLLM do. Neither is here: what stands in has their paths, keys,
statuses and shapes of answers, refuses what it does not know, and answers with the weights it was told to load.
"""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import server  # noqa: E402
from stoker.contract.errors import EX_USAGE, Refusal  # noqa: E402
from stoker.control.record.rollouts_log import read_rollouts  # noqa: E402
from stoker.training.config.flags import parse  # noqa: E402
from stoker.training.config.layers import gather  # noqa: E402
from stoker.training.config.resolve import settle  # noqa: E402
from stoker.training.generate.config import Sampling  # noqa: E402
from stoker.training.model import hf  # noqa: E402
from stoker.training.rl.server_match import own_logprobs  # noqa: E402
from stoker.training.serve.engine import PagedEngine, Sizes, answers  # noqa: E402
from stoker.training.serve.request import Request  # noqa: E402
from stoker.training.stages import grpo as stage  # noqa: E402
from test_grpo import Forks, model_that_answers_with_a_digit  # noqa: E402
from test_grpo_server import FORKS  # noqa: E402

SGLANG = {"n", "max_new_tokens", "temperature", "stop_token_ids", "skip_special_tokens", "no_stop_trim"}
VLLM = {"model", "prompt", "n", "max_tokens", "seed", "temperature", "stop_token_ids", "logprobs", "return_token_ids"}
ECHO = {"prompt", "max_tokens", "temperature", "echo", "logprobs", "model"}


class Emulator:
    """`folder`: the weights it begins with, under the version that sglang gives them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder, self._draw = kind, folder, random.Random(0)
        self.loaded: list[str] = []  # versions, or names of adapters, in their order
        self.asked: list[str] = []  # of which each question was answered
        self._lock = threading.Lock()
        self.restart()
        emulator = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with emulator._lock:
                    status, told = emulator._answered(self.path, body)
                data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def restart(self) -> None:
        """As a server that was replaced: with the weights of its command line."""
        self._models = {"default": self._opened(self._folder)}
        self._version = "default"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _opened(self, folder: Path | str) -> Any:
        return hf.opened(str(folder), 48, torch.float32, torch.device("cpu"), lambda line: None).eval()

    def _answered(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions" and body.get("echo") and set(body) <= ECHO:
            values = own_logprobs(self._models[self._version], body["prompt"])
            return 200, {"choices": [{"logprobs": {"token_logprobs": [None, *values, -1.0]}}]}
        if self.kind == "sglang" and path == "/update_weights_from_disk":
            if set(body) != {"model_path", "weight_version"}:
                return 400, {"success": False, "message": f"unknown keys: {sorted(body)}"}
            self._version = body["weight_version"]
            self._models = {self._version: self._opened(body["model_path"])}
            self.loaded.append(self._version)
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if self.kind == "sglang" and path == "/generate":
            return self._sglang(body)
        if self.kind == "vllm" and path == "/v1/load_lora_adapter":
            name = body["lora_name"]
            if name in self._models:
                return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded.", "code": 400}}
            self._models[name] = self._opened(body["lora_path"])
            self.loaded.append(name)
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if self.kind == "vllm" and path == "/v1/completions":
            return self._vllm(body)
        return 404, {"detail": "Not Found"}

    def _sglang(self, body: dict[str, Any]) -> tuple[int, Any]:
        how = body["sampling_params"]
        if set(body) != {"input_ids", "sampling_params", "return_logprob"} or set(how) != SGLANG:
            return 400, {"error": {"message": f"unexpected keys {sorted(body)}, {sorted(how)}"}}
        self.asked.append(self._version)
        seeds = [self._draw.randrange(1 << 40) for _ in range(how["n"])]  # its own: it is not told any
        found = self._written(self._version, body["input_ids"], how["max_new_tokens"], how, seeds)
        told = [
            {
                "text": "", "output_ids": list(one.tokens),
                "meta_info": {
                    "id": "x", "finish_reason": {"type": one.finish, "matched": one.tokens[-1]}, "weight_version": self._version,
                    "output_token_logprobs": [[value, token, None] for value, token in zip(one.logprobs, one.tokens, strict=True)],
                },
            }
            for one in found
        ]  # fmt: skip
        return 200, told if how["n"] > 1 else told[0]

    def _vllm(self, body: dict[str, Any]) -> tuple[int, Any]:
        if set(body) != VLLM:
            return 400, {"error": {"message": f"unexpected keys {sorted(body)}", "code": 400}}
        if body["model"] not in self._models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        self.asked.append(body["model"])
        seeds = [body["seed"] + number for number in range(body["n"])]
        found = self._written(body["model"], body["prompt"], body["max_tokens"], body, seeds)
        choices = [
            {
                "index": number, "text": "", "token_ids": list(one.tokens), "finish_reason": one.finish,
                "logprobs": {"token_logprobs": list(one.logprobs)},
            }
            for number, one in enumerate(found)
        ]  # fmt: skip
        return 200, {"model": body["model"], "choices": choices}

    def _written(self, which: str, prompt: list[int], most: int, how: dict[str, Any], seeds: list[int]) -> Any:
        engine = PagedEngine(self._models[which], Sizes(8, 48, 512))
        stop, sampling = frozenset(how["stop_token_ids"]), Sampling(how["temperature"])
        return answers(
            engine, [Request(str(seed), tuple(prompt), most, sampling, seed, stop=stop, logprobs=0) for seed in seeds]
        )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    model_that_answers_with_a_digit(folder)
    return folder


@pytest.fixture(scope="module")
def forks(given: Path) -> Iterator[Forks]:
    with server(FORKS) as ranks:
        yield Forks(ranks, given)


STEPS = ("--max-steps", "4", "--every_steps", "2", "--grpo.importance_cap", "2")
MORE = {"sglang": (), "vllm": ("--lora", "--lora_rank", "4")}


@pytest.mark.parametrize("kind", MORE)
def test_answers_are_of_the_newest_weights_and_come_with_their_log_probabilities(
    kind: str, forks: Forks, given: Path, tmp_path: Path
) -> None:
    emulator = Emulator(kind, given / "hf")
    try:
        job = forks(1, tmp_path, *STEPS, "--grpo.server", emulator.url, "--grpo.server_kind", kind, *MORE[kind])
    finally:
        emulator.close()
    assert job.codes == [0], job.said()
    names = ["0", "1", "2", "3"] if kind == "sglang" else ["stoker-0", "stoker-1", "stoker-2", "stoker-3"]
    assert emulator.loaded[:4] == names
    assert list(dict.fromkeys(emulator.asked)) == names, "each step by its own weights"
    assert all(line["staleness_max"] == 0 for line in job.metrics)
    assert all(abs(line["sampler_kl"]) < 1e-4 for line in job.metrics), "its log-probabilities are the trainers'"
    steps = [one.step for one in read_rollouts(str(job.run))]
    assert [steps.count(step) for step in range(4)] == [48] * 4


@pytest.mark.parametrize("kind", MORE)
def test_a_server_that_was_replaced_is_told_the_newest_weights_before_its_answers_count(
    kind: str, forks: Forks, given: Path, tmp_path: Path
) -> None:
    emulator = Emulator(kind, given / "hf")
    answered, asked = emulator._answered, list[str]()

    def once(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/generate", "/v1/completions") and not body.get("echo"):
            asked.append(path)
            if len(asked) == 10:
                emulator.restart()
        return answered(path, body)

    emulator._answered = once  # type: ignore[method-assign]
    try:
        job = forks(1, tmp_path, *STEPS, "--grpo.server", emulator.url, "--grpo.server_kind", kind, *MORE[kind])
    finally:
        emulator.close()
    assert job.codes == [0], job.said()
    again = [name for name in set(emulator.loaded) if emulator.loaded.count(name) > 1]
    assert again, emulator.loaded
    assert all(line["staleness_max"] == 0 for line in job.metrics)


def test_weights_that_a_server_cannot_take_are_refused_before_the_start(given: Path) -> None:
    for words, said in (
        (("grpo.server_kind=vllm",), "adapters: add --lora"),
        (("grpo.server_kind=sglang", "lora"), "whole weights"),
    ):
        told = (
            f"model.load={given / 'hf'}",
            f"grpo.prompts={given / 'prompts.jsonl'}",
            "grpo.server=http://127.0.0.1:1",
        )
        with pytest.raises(Refusal, match=said) as refused:
            stage.check(settle(gather(parse([f"--{flag}" for flag in (*told, *words)]), {}), True).config)
        assert refused.value.code == EX_USAGE
