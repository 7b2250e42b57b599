"""New weights through a process group: trainers and servers that live and die, and what is sent that does not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch

from conftest import at_length, wait_for
from stoker.contract.frozen import replace
from stoker.training.data.learn import train
from stoker.training.model import adapters, hf
from stoker.training.model.config import AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group
from stoker.training.rl.asking import Patient, ServerFailed
from stoker.training.rl.dialects import Published, Stoker
from stoker.training.rl.publish import To
from stoker.training.rl.sending import Sender, manifest_of
from stoker.training.rl.waiting import ServerWait
from stoker.training.serve import receiving
from stoker.training.serve.api import Problem
from test_serve import CONTEXT, TEXTS
from test_serve_weights import PATH, Pushed, saved, shape_of, wanted

KEY = "group-tests"
BUCKET = 4096  # so that tensors are cut, and share buckets


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("base")
    words = train(TEXTS, 300, str(place / "tokenizer"))
    return saved(shape_of(words), 5, place / "base", place / "tokenizer")


class Member(Pushed):
    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(folder, "--slots", "4", *flags, STOKER_API_KEY=KEY)

    def ask(self, path: str, body: Any = None, key: str = KEY, **headers: str) -> tuple[int, Any]:
        return super().ask(path, body, key, **headers)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def servers(base: Path) -> Iterator[list[Member]]:
    with (
        Member(base, "--weights-group", "127.0.0.1") as one,
        Member(base, "--weights-group", "10.1.1.1,127.0.0.1") as two,
    ):
        yield [one, two]


def sender(model: Decoder, servers: list[Member], own: adapters.Beside | None = None, **more: Any) -> Sender:
    to = To([one.address for one in servers], "group", 0, Patient(KEY, 20.0), ServerWait(), print)
    group = Group(ParallelConfig(device="cpu", strategy="ddp"))
    return Sender(model, own, group, to, **{"patience_s": 60.0, "bucket": BUCKET, **more})


def push(server: Member, published: Published) -> tuple[int, Any]:
    return server.ask(*Stoker("finish").push(published))


def model_of(base: Path, seed: int) -> Decoder:
    made = Decoder(shape_of_folder(base), CONTEXT)
    made.start(seed)
    return made


def shape_of_folder(base: Path) -> Any:
    return hf.opened(str(base), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None).config


def tokens_of(model: Decoder, base: Path, folder: Path) -> list[int]:
    """What the folder way has of the same weights."""
    hf.save(
        model, str(folder), say=lambda _: None, dtype=torch.float32, tokenizer_folder=str(base.parent / "tokenizer")
    )
    return wanted(folder)


def test_two_servers_get_whole_weights_and_adapters(servers: list[Member], base: Path, tmp_path: Path) -> None:
    model = model_of(base, 6)
    send = sender(model, servers)
    try:
        published = send(7)
        for server in servers:
            before = server.answer()[1]["version"]
            assert before == 0, "what has come changes nothing until its version is told"
            assert push(server, published) == (200, {"version": 7, "digest": published.digest})
            assert push(server, published)[0] == 200, "another trainer says the same"
        same = send(7)  # where another server was replaced
        assert [push(server, same) for server in servers] == [push(servers[0], published)] * 2
        tokens = tokens_of(model, base, tmp_path / "whole")
        assert [one.answer()[0] for one in servers] == [tokens] * 2 and tokens != wanted(base)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        again = send(8)
        assert again.digest != published.digest and push(servers[0], again)[0] == 200
        assert servers[0].answer()[0] == tokens_of(model, base, tmp_path / "next")
        assert servers[1].answer()[1]["version"] == 7, "nobody told it"
    finally:
        send.close()
    told = AdapterConfig(method="lora", lora_rank=4, lora_alpha=64.0)
    adapted = hf.opened(str(base), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
    adapters.attach(adapted, told, 1)
    with torch.no_grad():
        for target in adapted.modules():
            if getattr(target, "adapter", None) is not None:
                target.adapter.up.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    send = sender(adapted, servers[1:], adapters.Beside(told, str(base), {}))
    try:
        assert push(servers[1], send(9))[0] == 200
    finally:
        send.close()
    adapters.save(adapted, told, str(base), str(tmp_path / "adapter"), None, lambda _: None)
    merged = hf.opened(str(tmp_path / "adapter"), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
    assert servers[1].answer()[0] == tokens_of(merged, base, tmp_path / "merged")


TRAINER = """
import json, sys, time, urllib.request
import torch
from stoker.training.serve.transfer import own_address
from stoker.training.rl.sending import Outlet
from stoker.training.rl.waiting import ServerWait
port, key, body, total = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
outlet = Outlet("127.0.0.1", 2, "gloo", 4096, ServerWait())
body |= {"transfer": "half", "group": outlet.seen_by(1)}
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/weights", json.dumps(body).encode(), headers)
assert json.load(urllib.request.urlopen(asked)) == {"transfer": "half", "joined": False}
outlet.put(torch.ones(total // 2, dtype=torch.uint8))
print("half", flush=True)
time.sleep(600)
"""


def test_a_trainer_that_is_killed_while_it_sends_leaves_the_server_as_it_was(servers: list[Member], base: Path) -> None:
    server, model = servers[0], model_of(base, 8)
    before, manifest = server.answer(), manifest_of(model, None)
    argv = [str(server.port), KEY, json.dumps(manifest.body), str(manifest.total)]
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, *argv], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "half\n"
    assert server.answer() == before, "while it comes, too"
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    status, told = server.ask(PATH, {"transfer": "half", "version": 3, "digest": "d"})
    assert status == 409 and "transfer half broke off: " in told["error"]["message"], told
    assert server.answer() == before and server.process.poll() is None
    assert wait_for(lambda: not children(server.process.pid) or None, 30), "nothing is left of the group"


def children(pid: int) -> str:
    return "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))


def test_a_server_that_nobody_sends_anything_gives_the_memory_back(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(base, 1)
    receiver = receiving.Receiver(model, str(base), ("127.0.0.1",))
    group = {"name": "x", "address": "127.0.0.1:1", "backend": "gloo", "rank": 1, "size": 2, "bucket": BUCKET}
    receiver.begin("t", {"group": group, **manifest_of(model, None).body})
    before = children(os.getpid()).split()
    receiver.rest()
    assert receiver.is_open
    monkeypatch.setattr(receiving, "REST_S", -1.0)
    receiver.rest()
    assert not receiver.is_open and len(children(os.getpid()).split()) == len(before) - 1
    with pytest.raises(Problem, match="send it again"):
        receiver.take("t", "")


@at_length
def test_what_does_not_fit_or_is_not_allowed_is_refused_in_one_sentence(servers: list[Member], base: Path) -> None:
    server, c = servers[0], shape_of_folder(base)
    before = server.answer()
    for other, said in ((replace(c, ff=c.ff + 16), "weights of another shape"), (replace(c, layers=3), "does not have this tensor"),
                        (replace(c, layers=1), "is missing")):  # fmt: skip
        send = sender(Decoder(other, CONTEXT), [server])
        with pytest.raises(ServerFailed) as refused:
            send(1)
        assert said in str(refused.value) and "status 409" in str(refused.value) and "\n" not in str(refused.value)
    manifest = manifest_of(model_of(base, 1), None)
    group = {"name": "x", "address": "127.0.0.1:1", "backend": "gloo", "rank": 1, "size": 2, "bucket": BUCKET}
    good = {"transfer": "t", "group": group, **manifest.body}
    for body, status, said in (
        ({**good, "group": {**group, "address": "127.0.0.2:1"}}, 403, "--weights-group"),
        ({**good, "group": {**group, "address": "x"}}, 400, "group"), ({**good, "group": {**group, "rank": 2}}, 400, "group"),
        ({**good, "group": {**group, "backend": "mpi"}}, 400, "group"), ({**good, "group": 5}, 400, "group"),
        ({**good, "group": {**group, "bucket": 1 << 40}}, 400, "bucket"), ({**good, "tensors": []}, 400, "tensors"),
        ({**good, "tensors": [["a", "I8", [1]]]}, 400, "tensors"), ({**good, "tensors": [["a", "F32", [-1]]]}, 400, "tensors"),
        ({**good, "transfer": 5}, 400, "transfer"), ({**good, "folder": "x"}, 400, "transfer"),
        ({"transfer": "unknown", "version": 1, "digest": "d"}, 409, "send it again"),
        ({"transfer": "t"}, 400, "needs its digest"), ({"folder": "x"}, 403, "--weights-from"),
        ({**good, "tensors": manifest.body["tensors"] * 2}, 409, "listed twice"),
        ({**good, "adapter": {"r": "x"}, "base": ""}, 409, "base model other than"),
    ):  # fmt: skip
        found, told = server.ask(PATH, body)
        assert found == status and said in told["error"]["message"], (body, found, told)
    assert server.ask(PATH, good, key="wrong")[0] == 401
    send = sender(model_of(base, 9), [server])
    try:
        published = send(4)
        status, told = push(server, replace(published, digest="0" * 32))
        assert status == 422 and "has the digest" in told["error"]["message"]
        assert server.answer() == before, "whatever came"
        published = send(5)
        assert push(server, published)[0] == 200 and server.answer()[1]["digest"] == published.digest
    finally:
        send.close()
