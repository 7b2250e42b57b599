"""`stoker serve [MODEL] [--host ADDRESS] [--port N]`: serves a model over HTTP with an OpenAI-compatible API."""

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
TURN = (
    8  # tokens that the GPU generates per answer before the host reads them: a stream comes in pieces of 20 to 100 ms
)
QUEUE = 512  # requests
GRACE_S = 30.0
EXTRA_FILES = 512  # open files in addition to one per request: other connections, model files, logs
_MODEL = (
    "a folder with weights, a run (path, id, name or latest), a speedrun's folder, or a hub id (default: the newest)"
)
_EPILOG = f"""examples:
  stoker serve                                     the newest run or speedrun that has a model, on http://127.0.0.1:{PORT}/v1
  stoker serve my-model --slots 32 --context 2048
  {API_KEY}=… stoker serve my-model --host 0.0.0.0      clients must send the key: Authorization: Bearer …
  stoker serve my-model --weights-from runs        loads weights that a training run publishes there

Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /v1/weights, /tokenize, /detokenize, /health and /metrics.
SIGTERM lets it finish running requests; Ctrl-C stops it immediately."""


def build_parser() -> OptionParser:
    description = "Serves a model over HTTP with an OpenAI-compatible API, until Ctrl-C."
    parser = OptionParser("stoker serve", description, _EPILOG)
    parser.option("model", "MODEL", _MODEL, nargs="?")
    parser.option("--stage", "NAME", "the stage of a speedrun whose model to serve (default: the last one)")
    parser.option("--name", "NAME", "the model's name for clients (default: its folder's name)")
    host = "address to listen on (default: 127.0.0.1, this machine only)"
    parser.option("--host", "ADDRESS", host, default="127.0.0.1")
    parser.option("--port", "N", f"port to listen on (default: {PORT}; 0: a free one)", int, default=PORT)
    key = f"file with the key that clients must send (or set {API_KEY}); required to listen beyond this machine"
    parser.option("--api-key-file", "FILE", key)
    weights = "POST /v1/weights may load folders below this one while the server runs (default: none)"
    parser.option("--weights-from", "FOLDER", weights)
    group = "POST /v1/weights may join process groups at these addresses, separated by commas (default: none)"
    parser.option("--weights-group", "HOST[:PORT]", group)
    parser.option("--slots", "N", "requests that are processed at the same time (default: 16)", int, default=16)
    queue = f"requests that may wait for a slot; more get a 429 (default: {QUEUE})"
    parser.option("--queue", "N", queue, int, default=QUEUE)
    grace = f"time for running requests to finish after SIGTERM (default: {GRACE_S:g}s)"
    parser.option("--grace", "TIME", grace, parse_duration, default=GRACE_S)
    context = "tokens of a prompt and its answer (default: what the model was trained for, up to 4096)"
    parser.option("--context", "N", context, int, default=0)
    memory = "KV cache size in tokens, shared by all requests (default: half of slots × context)"
    parser.option("--memory", "TOKENS", memory, int)
    device = "where to run the model (default: a GPU if there is one)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    check_port(args.port)
    if args.slots < 1 or args.queue < 0:
        line = f"--slots must be at least 1 and --queue at least 0, got {args.slots} and {args.queue}"
        raise Refusal(line, EX_USAGE)
    key = _read_key(args.api_key_file)
    if args.weights_from is not None and not os.path.isdir(args.weights_from):
        raise Refusal(f"--weights-from {escape(args.weights_from)} is not a folder", EX_NOINPUT)
    from stoker.training.generate.finding import find
    from stoker.training.model import hf_config, hf_files
    from stoker.training.model.config import ModelConfig

    model = find(args.model, args.stage, layout.runs_root(args.runs_dir, os.environ), print_status)
    shape = hf_config.shape_for(ModelConfig(), model.folder)
    if shape.engine == "transformers":
        line = f"{model.folder}: stoker serve needs a model of one of Stoker's families (`stoker docs families`)"
        raise Refusal(f"{line}; use `stoker chat` for this model", EX_USAGE)
    hf_files.check(model.folder, shape)
    listening = http_server.listen(args.host, args.port)
    if not http_server.is_loopback(listening) and not key:
        listening.close()
        line = f"--host {args.host} is reachable from other machines and needs an API key; set {API_KEY} or give --api-key-file"
        raise Refusal(line, EX_USAGE)
    with listening:
        return _serve(args, model.folder, listening, key)


def _read_key(path: str | None) -> str:
    if path is None:
        return os.environ.get(API_KEY, "")
    key = read_text(path).strip()
    if not key:
        raise Refusal(f"--api-key-file {escape(path)} is empty", EX_USAGE)
    return key


def _serve(args: argparse.Namespace, folder: str, listening: socket.socket, key: str) -> int:
    from stoker.training.serve.driver import CounterLog, metrics
    from stoker.training.serve.front import App
    from stoker.training.serve.http_server import SIGNALS, HttpServer
    from stoker.training.serve.weights import Loader

    signals: list[int] = []
    for signum in SIGNALS:
        signal.signal(signum, lambda number, _frame: signals.append(number))
    served, driver, model = _load_engine(args, folder)
    is_local = http_server.is_loopback(listening)
    addresses = (args.weights_group or "").replace("localhost", "127.0.0.1").split(",")
    groups = tuple(address.strip() for address in addresses if address.strip())
    weights = None
    if args.weights_from is not None or groups:
        weights = Loader(model, folder, args.weights_from or "", driver, print_status, groups)
    token = secrets.token_urlsafe(24) if weights is not None and not key else ""
    app = App(
        served,
        driver,
        key=key,
        names=http_server.LOCAL_NAMES if is_local else (),
        metrics=lambda: metrics(driver, app.turned_away),
        weights=weights,
        token=token,
        version=lambda: (driver.engine.version, driver.engine.digest),
        about={"shared_memory": shared_weights.shm_identity(), "device": model.device.type},
        log=lambda line: print_status(escape(line, 500)),
    )
    _raise_open_file_limit(driver.most + EXTRA_FILES)
    server = HttpServer(app, listening, signals, args.grace)
    driver.died = server.wake
    driver.start()
    if weights is not None:
        weights.start()
    counters = None
    if run_dir := os.environ.get(env_vars.RUN_DIR):
        counters = CounterLog(driver, run_dir, int(os.environ.get("RANK", "0")), print_status)
        counters.start()

    def print_address() -> None:
        print(f"{http_server.server_url(listening, '/v1')}  model {served.name}", flush=True)
        if token:
            print_secret(f"token for POST /v1/weights: {token}")
        if not is_local:
            print_status("the connection is not encrypted: anyone on the network path can read the key and the texts")

    server.run(print_address, lambda: bool(driver.failure))
    if counters is not None:
        counters.close()
    if driver.failure:
        raise Refusal(f"the engine failed: {escape(driver.failure, 500)}", EX_SOFTWARE)
    driver.stop()
    return 0


def _raise_open_file_limit(count: int) -> None:
    """Raise this process's limit of open files to `count`, or as far as the system allows: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _load_engine(args: argparse.Namespace, folder: str) -> tuple[Served, Driver, Decoder]:
    # Import these only once there is a model and a port: they import torch, which takes seconds.
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

    device, context = device_of(args.device), context_of(folder, args.context)
    model, tokenizer = opened(folder, context, device, print_status)
    assert isinstance(model, Decoder)
    special_tokens, strips = frozenset(tokenizer.special.values()), tokenizer.told.decoding.strips

    def text_of(request: Request) -> Text:
        hidden = special_tokens - request.visible if request.skip_special_tokens else ()
        return Text(
            lambda token: tokenizer.decode_bytes([token]), request.stop_texts, hidden, strips and request.strips
        )

    memory = args.memory or max(args.slots * context // 2, context)
    engine = PagedEngine(
        model,
        Sizes(args.slots, context, memory, turn=TURN if device.type == "cuda" else 1),
        vocab=tokenizer.vocab_size,
        text_of=text_of,
        digest=weights_digest(folder),
    )
    name = args.name or os.path.basename(os.path.realpath(folder))
    if name == "hf" and not args.name:  # the folder hf/ of a run: use the run's name
        name = os.path.basename(os.path.dirname(os.path.realpath(folder)))
    size = f"{parameters(model) / 1e6:,.1f} M parameters"
    slots = f"{args.slots} slots of {context} tokens, memory for {memory} tokens"
    print_status(f"{folder}: {size}, {slots}, on {device.type}")
    served = Served(name, tokenizer, context, int(time.time()), Grammars(tokenizer))
    return served, Driver(engine, args.slots + args.queue), model
