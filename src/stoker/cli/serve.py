"""stoker serve [MODEL] [--stage NAME] [--host ADDRESS] [--port N] [--slots N] [--context N] [--memory TOKENS]"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import signal
import socket
import time

from stoker.contract import env_vars, layout, shared_weights
from stoker.contract.env_vars import API_KEY
from stoker.contract.errors import EX_NOINPUT, EX_SOFTWARE, EX_USAGE, Refusal
from stoker.contract.options import OptionParser, check_port
from stoker.contract.safe_io import read_text
from stoker.contract.terminal import print_secret, print_status
from stoker.contract.text import escape
from stoker.contract.units import parse_duration
from stoker.control.show import http_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve.api import Served
    from stoker.training.serve.driver import Driver

PORT = 8000
KEY = API_KEY
TURN = 8  # tokens of each answer between two looks of the host at a GPU: a stream comes in pieces of 20 to 100 ms
QUEUE = 512
GRACE_S = 30.0
MORE_FILES = 512  # than answers: connections of other clients, and the process's own files
_MODEL = (
    "a folder with weights, a run (path, id, name or latest), a speedrun's folder, or a hub id (default: the newest)"
)
_EPILOG = f"""examples:
  stoker serve                                     the newest run or speedrun that has a model, on http://127.0.0.1:{PORT}/v1
  stoker serve my-model --slots 32 --context 2048
  {KEY}=… stoker serve my-model --host 0.0.0.0      others need the key: Authorization: Bearer …
  stoker serve my-model --weights-from runs        takes what a training run publishes there

It has /v1/completions, /v1/chat/completions, /v1/models, /v1/weights, /tokenize, /detokenize, /health and /metrics.
SIGTERM lets it finish what it began; Ctrl-C ends it immediately."""


def parser() -> OptionParser:
    made = OptionParser(
        "stoker serve", "Answers requests for a model over HTTP, as OpenAI's API does, until Ctrl-C.", _EPILOG
    )
    made.option("model", "MODEL", _MODEL, nargs="?")
    made.option("--stage", "NAME", "which stage's model of a speedrun (default: the last one of the chain)")
    made.option("--name", "NAME", "what clients call the model (default: its folder's name)")
    made.option(
        "--host", "ADDRESS", "address to listen on (default: 127.0.0.1, this machine only)", default="127.0.0.1"
    )
    made.option("--port", "N", f"port to listen on (default: {PORT}; 0: a free one)", int, default=PORT)
    made.option("--api-key-file", "FILE", f"clients must send the key in it (or in {KEY}); needed beyond this machine")
    made.option(
        "--weights-from", "FOLDER", "POST /v1/weights may load folders below it while the server runs (default: none)"
    )
    group = "POST /v1/weights may join process groups at these addresses, with commas between them (default: none)"
    made.option("--weights-group", "HOST[:PORT]", group)
    made.option("--slots", "N", "answers written at once (default: 16)", int, default=16)
    made.option(
        "--queue", "N", f"requests that may wait for a slot; more get a 429 (default: {QUEUE})", int, default=QUEUE
    )
    grace = f"how long running requests may go on after SIGTERM (default: {GRACE_S:g}s)"
    made.option("--grace", "TIME", grace, parse_duration, default=GRACE_S)
    context = "tokens of a prompt and its answer (default: what the model was trained for, up to 4096)"
    made.option("--context", "N", context, int, default=0)
    memory = "tokens whose keys and values the cache holds, all answers together (default: half of slots × context)"
    made.option("--memory", "TOKENS", memory, int)
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU where there is one)"
    )
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    check_port(told.port)
    if told.slots < 1 or told.queue < 0:
        raise Refusal(
            f"--slots {told.slots}, --queue {told.queue} is out of range: at least 1 slot, and a queue of 0 or more",
            EX_USAGE,
        )
    key = _key(told.api_key_file)
    if told.weights_from is not None and not os.path.isdir(told.weights_from):
        raise Refusal(f"--weights-from {escape(told.weights_from)}: no such folder", EX_NOINPUT)
    from stoker.training.generate.finding import find
    from stoker.training.model import hf_config, hf_files
    from stoker.training.model.config import ModelConfig

    found = find(told.model, told.stage, layout.runs_root(told.runs_dir, os.environ), print_status)
    shape = hf_config.shape_for(ModelConfig(), found.folder)
    if shape.engine == "transformers":
        raise Refusal(
            f"{found.folder}: stoker serve needs a model of one of Stoker's families (`stoker docs families`); `stoker chat` opens it",
            EX_USAGE,
        )
    hf_files.check(found.folder, shape)
    listening = http_server.listen(told.host, told.port)
    if not http_server.is_loopback(listening) and not key:
        listening.close()
        raise Refusal(
            f"--host {told.host} is open to others: an API key is needed, in {KEY} or --api-key-file", EX_USAGE
        )
    with listening:
        return _serve(told, found.folder, listening, key)


def _key(path: str | None) -> str:
    if path is None:
        return os.environ.get(KEY, "")
    key = read_text(path).strip()
    if not key:
        raise Refusal(f"--api-key-file {escape(path)} is empty", EX_USAGE)
    return key


def _serve(told: argparse.Namespace, folder: str, listening: socket.socket, key: str) -> int:
    from stoker.training.serve.driver import CounterLog, metrics
    from stoker.training.serve.front import App
    from stoker.training.serve.http_server import SIGNALS, HttpServer
    from stoker.training.serve.weights import Loader

    received: list[int] = []
    for signum in SIGNALS:
        signal.signal(signum, lambda number, _frame: received.append(number))
    served, driver, model = _opened(told, folder)
    local = http_server.is_loopback(listening)
    addresses = (told.weights_group or "").replace("localhost", "127.0.0.1").split(",")
    groups = tuple(one.strip() for one in addresses if one.strip())
    takes = told.weights_from is not None or groups
    weights = Loader(model, folder, told.weights_from or "", driver, print_status, groups) if takes else None
    token = secrets.token_urlsafe(24) if weights is not None and not key else ""
    app = App(
        served,
        driver,
        key=key,
        names=http_server.LOCAL_NAMES if local else (),
        metrics=lambda: metrics(driver, app.turned_away),
        weights=weights,
        token=token,
        version=lambda: (driver.engine.version, driver.engine.digest),
        about={"shared_memory": shared_weights.shm_identity(), "device": model.device.type},
        log=lambda line: print_status(escape(line, 500)),
    )
    _allow_open_files(driver.most + MORE_FILES)
    server = HttpServer(app, listening, received, told.grace)
    driver.died = server.wake
    driver.start()
    if weights is not None:
        weights.start()
    counters = None
    if run_dir := os.environ.get(env_vars.RUN_DIR):
        counters = CounterLog(driver, run_dir, int(os.environ.get("RANK", "0")), print_status)
        counters.start()

    url = http_server.url(listening, "/v1")

    def started() -> None:
        print(f"{url}  model {served.name}", flush=True)
        if token:
            print_secret(f"token for POST /v1/weights: {token}")
        if not local:
            print_status("anybody who sees the traffic sees the key and the texts: it is not encrypted")

    server.run(started, lambda: bool(driver.failure))
    if counters is not None:
        counters.close()
    if driver.failure:
        raise Refusal(f"the engine failed: {escape(driver.failure, 500)}", EX_SOFTWARE)
    driver.stop()
    return 0


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as the system lets us: each client's connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _opened(told: argparse.Namespace, folder: str) -> tuple[Served, Driver, Decoder]:
    # torch: seconds, so only once there is a model and a port
    from stoker.training.generate.conversation import context_of, device_of, opened
    from stoker.training.model.adapters import weights_digest
    from stoker.training.model.decoder import Decoder
    from stoker.training.model.ready import parameters
    from stoker.training.serve.api import Served
    from stoker.training.serve.constrain import Grammars
    from stoker.training.serve.driver import Driver
    from stoker.training.serve.engine import PagedEngine, Sizes
    from stoker.training.serve.request import Request
    from stoker.training.serve.text import Text

    device, context = device_of(told.device), context_of(folder, told.context)
    model, words = opened(folder, context, device, print_status)
    assert isinstance(model, Decoder)
    marks, strips = frozenset(words.special.values()), words.told.decoding.strips

    def text_of(request: Request) -> Text:
        hidden = marks - request.visible if request.skip_special_tokens else ()
        return Text(lambda token: words.decode_bytes([token]), request.stop_texts, hidden, strips and request.strips)

    memory = told.memory or max(told.slots * context // 2, context)
    engine = PagedEngine(
        model,
        Sizes(told.slots, context, memory, turn=TURN if device.type == "cuda" else 1),
        vocab=words.vocab_size,
        text_of=text_of,
        digest=weights_digest(folder),
    )
    name = told.name or os.path.basename(os.path.realpath(folder))
    if name == "hf" and not told.name:
        name = os.path.basename(os.path.dirname(os.path.realpath(folder)))
    size = f"{parameters(model) / 1e6:,.1f} M parameters"
    print_status(
        f"{folder}: {size}, {told.slots} slots of {context} tokens, memory for {memory} tokens, on {device.type}"
    )
    return (
        Served(name, words, context, int(time.time()), Grammars(words)),
        Driver(engine, told.slots + told.queue),
        model,
    )
