"""Whether a server has the trainers' weights: asked over HTTP, of a model that really computes its answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.rl.server_match import Unanswered, WeightsCheck, own_logprobs, served_logprobs  # noqa: E402

IDS = [7, 3, 60, 12, 9, 41, 5, 2]
Reply = Callable[[dict[str, Any]], tuple[int, bytes]]


class Server:
    """`reply`: what it answers to POST /v1/completions. An exchange while it runs is a restart of the model alone."""

    def __init__(self) -> None:
        self.reply: Reply = lambda asked: (500, b"")
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = outer.reply(asked) if self.path == "/v1/completions" else (404, b"")
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    made = Decoder(ModelConfig(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=2, head_dim=16, ff=64), 32)
    made.start(seed)
    return made


def serves(model: Decoder, noise: float = 0.0) -> Reply:
    """As OpenAI's completions answer with echo and logprobs: the prompt's tokens and the new one, none for the first. By
    plain softmax over the logits.
    """

    def reply(asked: dict[str, Any]) -> tuple[int, bytes]:
        assert asked["echo"] and asked["logprobs"] and asked["temperature"] == 0 and asked["model"] == "m"
        ids = torch.tensor([asked["prompt"]])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).float(), -1)
        told = [None, *(logp[0, at, token].item() + noise * (-1) ** at for at, token in enumerate(asked["prompt"][1:]))]
        told.append(logp[0, -1].max().item())
        return 200, json.dumps({"choices": [{"text": "", "logprobs": {"token_logprobs": told}}]}).encode()

    return reply


def test_the_same_weights_say_the_same_and_other_weights_are_seen(server: Server) -> None:
    ours, theirs = decoder(1), decoder(1)
    server.reply = serves(theirs)
    mine = own_logprobs(ours, IDS)
    assert served_logprobs(server.address, "m", IDS) == pytest.approx(mine, abs=1e-4)
    check = WeightsCheck(server.address, "m", IDS)
    assert check(mine) == ""
    server.reply = serves(theirs, noise=0.05)
    assert check(mine) == "" == check(mine), "rounding of another engine"
    with torch.no_grad():
        for weight in ours.parameters():  # what many updates do, and the server has none of them
            weight.add_(0.3 * torch.randn_like(weight))
    learned = own_logprobs(ours, IDS)
    server.reply = serves(theirs)
    assert check(learned) == "", "it may be taking new weights just now"
    said = check(learned)
    assert said.startswith(f"the server at {server.address} answers with other weights than the trainers'")
    assert "(0.00 at the start), at 2 checks in a row" in said
    server.reply = serves(ours)
    assert check(learned) == "" and check(learned) == "", "it has loaded them"


def test_another_model_is_seen_at_the_first_check(server: Server) -> None:
    server.reply = serves(decoder(1))
    other = decoder(2)
    with torch.no_grad():
        other.head_weight.mul_(8.0)
    said = WeightsCheck(server.address, "m", IDS)(own_logprobs(other, IDS))
    assert "other weights than the trainers'" in said and "at the start" not in said


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (503, b"loading\x1b[31m", "HTTP status 503: loading"),
        (200, b"{", "its answer has no token_logprobs"),
        (200, b'{"choices": []}', "its answer has no token_logprobs"),
        (200, b'{"choices": [{"logprobs": null}]}', "its answer has no token_logprobs"),
        (200, b'{"choices": [{"logprobs": {"token_logprobs": [null, -1.0]}}]}', "match the 8 tokens"),
        (200, json.dumps({"choices": [{"logprobs": {"token_logprobs": [None] * 9}}]}).encode(), "match the 8"),
        (200, b'{"choices": [{"logprobs": {"token_logprobs": [null, NaN, 1, 1, 1, 1, 1, 1]}}]}', "match the 8"),
    ],
)  # fmt: skip
def test_an_answer_that_says_nothing_of_its_weights_is_no_mismatch(
    server: Server, status: int, body: bytes, said: str
) -> None:
    server.reply = lambda asked: (status, body)
    with pytest.raises(Unanswered) as raised:
        served_logprobs(server.address, "m", IDS)
    assert said in str(raised.value) and str(raised.value).isprintable()


def test_a_server_that_is_gone_is_no_mismatch(server: Server) -> None:
    address = server.address
    server.close()
    try:
        with pytest.raises(Unanswered, match="Connection refused"):
            WeightsCheck(address, "m", IDS)([0.0] * 7)
    finally:
        server.__init__()  # type: ignore[misc]  # the fixture closes it


@pytest.mark.parametrize(
    "told", [10**400, -(10**400), True, float("nan"), float("inf"), "-1", None, [-1.0]], ids=lambda told: str(told)[:8]
)
def test_impossible_numbers_of_a_server_are_no_answer(told: object) -> None:
    """A number of 400 digits was an OverflowError in whoever asked."""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"logprobs": {"token_logprobs": [None, told]}}]}).encode())

        def log_message(self, *told: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(Unanswered, match="don't match the 2 tokens"):
            served_logprobs(f"127.0.0.1:{server.server_port}", "m", [1, 2])
        thread.join()
