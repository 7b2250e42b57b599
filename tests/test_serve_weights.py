"""New weights for a server that runs, over HTTP: answers are the new model's, and what can't be loaded changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import wait_for
from stoker.contract import shared_weights
from stoker.contract.frozen import replace
from stoker.training.data.learn import train
from stoker.training.model import adapters, hf
from stoker.training.model.config import AdapterConfig, ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import Tokenizer, load
from test_serve import CONTEXT, TEXTS, Server

PATH = "/v1/weights"
ASKED = {"prompt": "she sells", "max_tokens": 24, "temperature": 0, "return_token_ids": True}


class Pushed(Server):
    token = ""

    def __init__(self, folder: Path, *flags: str, **variables: str) -> None:
        super().__init__(folder, *flags, **variables)
        assert self.process.stdout is not None
        if "STOKER_API_KEY" not in variables:
            self.token = self.process.stdout.readline().split(": ")[1].strip()

    def push(self, folder: Any, **more: Any) -> tuple[int, Any]:
        return self.ask(PATH, {"folder": str(folder), **more}, self.token)

    def answer(self) -> tuple[list[int], dict[str, Any]]:
        (choice,) = self.ask("/v1/completions", ASKED)[1]["choices"]
        assert set(choice["versions"]) == {choice["weights"]["version"]}
        return choice["token_ids"], choice["weights"]


def shape_of(words: Tokenizer) -> ModelConfig:
    return ModelConfig(
        layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=words.vocab_size, qk_norm=True, init_std=0.3
    )  # fmt: skip


def saved(shape: ModelConfig, seed: int, folder: Path, tokenizer: Path) -> Path:
    made = Decoder(shape, CONTEXT)
    made.start(seed)
    hf.save(made, str(folder), say=lambda _: None, tokenizer_folder=str(tokenizer))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base and pushed/: other weights, an adapter for base, and folders that can't be loaded."""
    place = tmp_path_factory.mktemp("place")
    words = train(TEXTS, 300, str(place / "tokenizer"))
    shape, pushed = shape_of(words), place / "pushed"
    base = saved(shape, 5, place / "base", place / "tokenizer")
    for seed in (6, 7):
        saved(shape, seed, pushed / f"seed-{seed}", place / "tokenizer")
    saved(replace(shape, layers=3), 6, pushed / "deeper", place / "tokenizer")
    saved(replace(shape, ff=64), 6, pushed / "wider", place / "tokenizer")
    for name, seed in (("adapter", 1), ("adapter-2", 2)):
        model = hf.opened(str(base), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
        told = AdapterConfig(method="lora", lora_rank=4, lora_alpha=64.0)
        adapters.attach(model, told, seed)
        with torch.no_grad():
            for target in model.modules():
                if getattr(target, "adapter", None) is not None:
                    target.adapter.up.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(seed))
        adapters.save(model, told, str(base), str(pushed / name), None, lambda _: None)
    shutil.copytree(pushed / "adapter", pushed / "stranger")
    tensors = load_file(pushed / "adapter" / "adapter_model.safetensors")
    save_file(tensors, pushed / "stranger" / "adapter_model.safetensors", {adapters.DIGEST: "0" * 32})
    cut = shutil.copytree(pushed / "seed-6", pushed / "cut")
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(cut / "model.safetensors") - 100)
    (pushed / "empty").mkdir()
    (pushed / "file").write_text("x")
    shutil.copytree(pushed / "seed-6", pushed / "linked")
    (pushed / "linked" / "model.safetensors").unlink()
    (pushed / "linked" / "model.safetensors").symlink_to(base / "model.safetensors")
    (pushed / "out").symlink_to(base)
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Pushed]:
    flags = ("--name", "small", "--slots", "4", "--memory", "1024", "--weights-from", str(place / "pushed"))
    with Pushed(place / "base", *flags) as started:
        yield started


def wanted(folder: Path) -> list[int]:
    model = hf.opened(str(folder), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
    words = load(str(folder.parent.parent / "tokenizer" if "pushed" in str(folder) else folder))
    ids = [*words.start, *words.encode(ASKED["prompt"])]
    engine = BatchEngine(model, rows=1, length=CONTEXT, vocab=words.vocab_size)
    (found,) = engine.generate([ids], new_tokens=24, stop={words.end_id}, temperature=0)
    return found


def test_answers_are_the_new_weights_whole_or_an_adapters_and_carry_version_and_digest(
    server: Pushed, place: Path
) -> None:
    base = server.answer()
    assert base[0] == wanted(place / "base") and base[1]["digest"] == adapters.weights_digest(str(place / "base"))
    assert server.ask(PATH) == (200, {**base[1], "shared_memory": shared_weights.shm_identity(), "device": "cpu"})
    seen = {tuple(base[0])}
    pushed = place / "pushed"
    for number, name in enumerate(("adapter", "adapter-2", "seed-6", "seed-7"), 10):
        status, told = server.push(name, version=number)
        assert (status, told) == (200, {"version": number, "digest": adapters.weights_digest(str(pushed / name))})
        tokens, weights = server.answer()
        assert tokens == wanted(pushed / name) and weights == told, name
        seen.add(tuple(tokens))
    assert len(seen) == 5, "each model answers otherwise"
    assert server.push("adapter", version=13)[0] == 200, "whatever is served: it is for what the server began with"
    assert server.answer()[0] == wanted(pushed / "adapter")
    status, told = server.push("stranger")
    assert status == 409 and "on other weights" in told["error"]["message"]
    assert server.push(pushed / "seed-6")[1]["version"] == 14, "a whole path, and one more than the last"
    assert server.answer()[0] == wanted(pushed / "seed-6")


BAD: tuple[tuple[Any, int, str], ...] = (
    (b"{", 400, "not JSON"), ([], 400, "JSON object"), ({}, 400, "folder"), ({"folder": 5}, 400, "folder"), ({"folder": ""}, 400, "folder"),
    ({"folder": "a\0b"}, 400, "folder"), ({"folder": "seed-6", "versoin": 1}, 400, "did you mean"),
    ({"folder": "seed-6", "version": -1}, 400, "version"), ({"folder": "seed-6", "version": 1.5}, 400, "version"),
    ({"folder": "nothing"}, 404, "no such folder"), ({"folder": "file"}, 404, "no such folder"), ({"folder": "empty"}, 404, "empty"),
    ({"folder": "../base"}, 403, "not in the folder"), ({"folder": "/etc"}, 403, "not in the folder"), ({"folder": "out"}, 403, "not in the folder"),
    ({"folder": "seed-6/../../nothing"}, 403, "not in the folder"), ({"folder": "linked"}, 403, "link to a place outside"),
    ({"folder": "deeper"}, 409, "its layers is 3, and that of the served model is 2"), ({"folder": "wider"}, 409, "another shape"),
    ({"folder": "cut"}, 422, "model.safetensors is damaged"), ({"folder": "seed-6", "digest": "00"}, 422, "has the digest"),
)  # fmt: skip


def test_what_cannot_be_loaded_gets_the_status_and_one_sentence_and_the_old_weights_stay(server: Pushed) -> None:
    before = server.answer()
    for body, status, words in BAD:
        found, told = server.ask(PATH, body, server.token)
        line = told["error"]["message"]
        assert found == status and words in line and "\n" not in line and "Traceback" not in line, (body, found, told)
    good = {"folder": "seed-7"}
    for key in ("", "wrong", server.token[:-1]):
        assert server.ask(PATH, good, key)[0] == 401
    assert server.ask(PATH, good, server.token, Host="elsewhere.example")[0] == 403
    assert server.ask(PATH, good, server.token, **{"Content-Type": "text/plain"})[0] == 415
    assert server.answer() == before and server.process.poll() is None


def test_weights_in_shared_memory_are_taken_from_closed_folders_of_ones_own_user(server: Pushed, place: Path) -> None:
    """Whatever --weights-from is: who may write there is who runs the server."""
    made = shared_weights.SharedFolder()
    try:
        version = shutil.copytree(place / "pushed" / "seed-6", Path(made.path) / "version-00000001")
        status, told = server.push(version, version=31)
        assert status == 200 and server.answer() == (wanted(place / "pushed" / "seed-6"), told)
        before = server.answer()
        linked = shutil.copytree(place / "pushed" / "seed-7", Path(made.path) / "version-00000002")
        (linked / "model.safetensors").unlink()
        (linked / "model.safetensors").symlink_to(place / "base" / "model.safetensors")
        (Path(made.path) / "version-00000003").symlink_to(place / "base")
        for path in (linked, linked.parent / "version-00000003", f"{made.path}/../../etc", made.path):
            assert server.push(path)[0] == 403, path
        os.chmod(made.path, 0o755)
        assert server.push(version)[0] == 403, "others can look into it"
        assert server.answer() == before
    finally:
        made.remove()


def test_running_answers_finish_on_the_old_weights_or_continue_with_the_new_ones(server: Pushed) -> None:
    """Twelve answers through four slots: the change comes in their middle. Three push the same version: it is loaded once."""
    body = {"prompt": "the quick", "max_tokens": 200, "n": 12, "return_token_ids": True, "stop_token_ids": []}
    for policy in ("continue", "finish"):
        assert server.push("seed-6", version=20)[0] == 200
        found: list[Any] = []
        replies: list[tuple[int, Any]] = []
        asking = threading.Thread(
            target=lambda found=found, policy=policy: found.append(
                server.ask("/v1/completions", {**body, "on_update": policy})
            )
        )
        pushing = [
            threading.Thread(target=lambda replies=replies: replies.append(server.push("seed-7", version=21)))
            for _ in range(3)
        ]
        asking.start()
        assert wait_for(lambda: server.numbers()["stoker_serve_running"] == 4 or None, 60)
        for thread in pushing:
            thread.start()
        for thread in (asking, *pushing):
            thread.join()
        assert [(status, told["version"]) for status, told in replies] == [(200, 21)] * 3, replies
        versions = [choice["versions"] for choice in found[0][1]["choices"]]
        assert all(one == sorted(one) for one in versions) and {20, 21} == {
            number for one in versions for number in one
        }
        mixed = sum(len(set(one)) > 1 for one in versions)
        assert mixed == 0 if policy == "finish" else mixed > 0, versions
        for choice in found[0][1]["choices"]:
            assert choice["weights"]["version"] == choice["versions"][-1] and len(choice["weights"]["digest"]) == 32


def test_a_request_that_names_the_oldest_weights_is_answered_by_no_older_ones(place: Path) -> None:
    with Pushed(place / "base", "--weights-from", str(place / "pushed")) as server:

        def asked(**more: Any) -> tuple[int, Any]:
            return server.ask("/v1/completions", {**ASKED, **more})

        assert asked()[0] == 200
        status, told = asked(min_weight_version=0)
        assert status == 409 and "those it was started with" in told["error"]["message"]
        assert server.push("seed-6", version=7)[0] == 200
        for oldest in (0, 7):
            status, told = asked(min_weight_version=oldest)
            assert status == 200 and set(told["choices"][0]["versions"]) == {7}
        status, told = asked(min_weight_version=8)
        assert status == 409 and told["error"]["code"] == "weights_too_old", told
        assert told["error"]["param"] == "min_weight_version" and "version 7" in told["error"]["message"]
        assert asked()[0] == 200, "other clients are answered"
        for bad in (-1, 1.5, "7", True):
            assert asked(min_weight_version=bad)[0] == 400


def test_without_a_folder_for_them_no_weights_are_taken_and_with_a_key_the_key_is_needed(place: Path) -> None:
    flags = ("--weights-from", str(place / "pushed"))
    with Pushed(place / "base", *flags, STOKER_API_KEY="secret") as server:
        assert server.push("seed-6")[0] == 401
        assert server.ask(PATH, {"folder": "seed-6"}, "secret")[0] == 200
    with Server(place / "base") as plain:
        status, told = plain.ask(PATH, json.dumps({"folder": "seed-6"}).encode())
        assert status == 403 and "--weights-from" in told["error"]["message"]


Change = Callable[[], None]


class Engine:
    """Answers are being written all the time: what it is given waits until `apply`."""

    def __init__(self) -> None:
        self.pending: list[tuple[Change, Callable[[int], None]]] = []

    def update(self, change: Change, version: int | None, digest: str, applied: Callable[[int], None]) -> None:
        self.pending.append((change, applied))

    def apply(self) -> None:
        change, applied = self.pending.pop(0)
        change()
        applied(7)


def is_waiting(ident: int | None, for_more: Callable[[], bool]) -> bool:
    """A thread that waits for the engine, or for bodies where there are none."""
    frame: FrameType | None = sys._current_frames().get(ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:1] == ["wait"] and ("_load" in names or for_more())


def test_weights_that_wait_are_in_memory_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve.weights import Loader

    shape = ModelConfig(layers=1, dim=16, heads=2, kv_heads=2, head_dim=8, ff=16, vocab_size=300)
    for seed in range(4):
        made = Decoder(shape, 32)
        made.start(seed)
        hf.save(made, str(tmp_path / "pushed" / str(seed)), say=lambda _: None, tokenizer_folder=None)
    base = str(tmp_path / "pushed" / "0")
    model = hf.opened(base, 32, torch.float32, torch.device("cpu"), lambda _: None)
    engine, replies = Engine(), list[int]()
    loader = Loader(model, base, str(tmp_path / "pushed"), engine, lambda _: None)
    loader.start()
    for seed in range(1, 4):
        loader.load(json.dumps({"folder": str(seed)}).encode(), lambda status, _: replies.append(status))
    for done in range(3):
        rests = lambda: (engine.pending and is_waiting(loader._thread.ident, loader._bodies.empty)) or None  # noqa: E731
        assert wait_for(rests, 60)
        assert len(engine.pending) == 1, "copies of the weights that nobody uses yet"
        engine.apply()
        assert len(replies) == done + 1
    assert replies == [200, 200, 200]
