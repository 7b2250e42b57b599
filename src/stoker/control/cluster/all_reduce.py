"""Measures an all-reduce between the hosts, predicts the cost of a step's gradients from it, and tunes it (--tune)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from math import prod
from statistics import median
from typing import Any

from stoker.contract.errors import EX_CANTCREAT, EX_CONFIG, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import AtomicFile, read_text
from stoker.contract.tensor_header import read_header
from stoker.contract.text import parse_json
from stoker.contract.yaml_text import YamlError, parse_yaml
from stoker.control.cluster.check_facts import AllReduceFacts, ClusterFacts, HostFacts, format_bandwidth
from stoker.control.cluster.hosts import Hosts
from stoker.control.cluster.probes import STORE, TIMES, PendingProbe, ProbeBatch, check_answer

REDUCE_S = 20.0
TARGET_S = 0.12  # duration of one all-reduce: long enough to measure, short enough to repeat
REPEATS = 5
FORWARDED = ("NCCL_", "GLOO_", "TORCH_")  # prefixes of variables that a run passes on to its ranks

Environments = Mapping[str, Mapping[str, str]]  # host -> variables


def may_reduce(facts: ClusterFacts) -> bool:
    """Return whether an all-reduce can finish: there are several hosts, all have the same torch, and
    full-size packets arrive between every pair.
    """
    hosts = _hosts_with_torch(facts)
    same_build = len({host.torch_build for host in hosts}) == 1
    all_connect = bool(facts.pairs) and all(not pair.closed and pair.big for pair in facts.pairs)
    return len(hosts) > 1 and len(hosts) == len(facts.reachable) and same_build and all_connect


def _hosts_with_torch(facts: ClusterFacts) -> list[HostFacts]:
    return [host for host in facts.reachable if host.address and host.torch and host.torch.version]


def backend_of(facts: ClusterFacts) -> str:
    """Return "nccl" if every host has a GPU and a torch with CUDA and NCCL, else "gloo"."""
    can_use_nccl = all(
        host.examination and host.examination.machine.gpus and host.torch and host.torch.cuda and host.torch.nccl
        for host in facts.reachable
    )
    return "nccl" if can_use_nccl else "gloo"


def interface_env(host: HostFacts) -> dict[str, str]:
    """Return the variables that make NCCL and gloo use the host's interface towards the others."""
    return {name: host.interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if host.interface}


def run_env(facts: ClusterFacts, hosts: Hosts) -> dict[str, dict[str, str]]:
    """Return host -> the variables that a run would give to its ranks on that host."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    return {host.name: {**interface_env(host), **hosts.env, **forwarded} for host in facts.reachable}


def run_all_reduce(
    batch: ProbeBatch, worker: PendingProbe, facts: ClusterFacts, env: Environments, repeats: int = REPEATS
) -> AllReduceFacts:
    """Run and time all-reduces. `worker` is the running probe that has torch imported on each host.

    Rank 0 opens the store on a free port and reports it. Then the others get that port and connect.
    """
    hosts, backend = _hosts_with_torch(facts), backend_of(facts)
    orders = {
        host.name: {
            "do": "reduce",
            "rank": rank,
            "world": len(hosts),
            "address": hosts[0].address,
            "backend": backend,
            "seconds": REDUCE_S,
            "target": TARGET_S,
            "repeats": repeats,
            "env": {**env[host.name], **_gpu_env(host, backend)},
        }
        for rank, host in enumerate(hosts)
    }
    counts = {name: len(worker.partial[name]) for name in orders}
    first, *others = orders
    batch.send(worker, {first: orders[first]})
    store = check_answer(STORE, _next_answer(batch, worker, first, counts[first]), "its store")
    if "port" not in store:
        return AllReduceFacts(
            len(hosts), backend, error=f"{first}: {store.get('error', 'torch did not open its store')}"
        )
    counts[first] += 1
    batch.send(worker, {name: {**orders[name], "port": store["port"]} for name in others})
    answers = {
        name: check_answer(TIMES, _next_answer(batch, worker, name, count), "its times")
        for name, count in counts.items()
    }
    errors = [
        f"{name}: {answer.get('error', 'its answer has no times')}"
        for name, answer in answers.items()
        if not answer.get("times") or min(answer["times"]) <= 0
    ]
    if errors:
        return AllReduceFacts(len(hosts), backend, error="; ".join(errors[:3]))
    return AllReduceFacts(len(hosts), backend, answers[first]["bytes"], tuple(answers[first]["times"]))


def _next_answer(batch: ProbeBatch, worker: PendingProbe, name: str, count: int) -> dict[str, Any]:
    """Wait for the partial answer after the first `count`. Return it, or {"error": ...}."""
    batch.wait(REDUCE_S + 3.0, lambda host: len(worker.partial[host]) > count or host in worker.answers, [name])
    if len(worker.partial[name]) > count:
        answer: dict[str, Any] = worker.partial[name][count]
        return answer
    return worker.answers.get(name) or {"error": "it did not answer"}


def _gpu_env(host: HostFacts, backend: str) -> dict[str, str]:
    """Return the variables that select the GPU with the most free memory, or {} for gloo or if no GPU is healthy."""
    gpus = host.examination.machine.gpus if host.examination and backend == "nccl" else ()
    healthy = [gpu for gpu in gpus if not gpu.error]
    if not healthy:
        return {}
    freest = max(healthy, key=lambda gpu: gpu.memory_free or 0)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": freest.uuid}


# ---- the cost of a step's gradients: 2(n-1)/n of their bytes cross each link of a ring ----

LORA_SHARE = 1_126_400 / 1.1e9  # trainable share of parameters with LoRA: rank 8 on q and v of a 1.1 B Llama
FORMULA = "2(n-1)/n × bytes / bandwidth"


@frozen
class StepCost:
    """The time that an all-reduce of one step's gradients takes."""

    what: str
    bytes: int
    seconds: float


def compute_step_costs(parameters: float, world_size: int, bandwidth: float) -> tuple[StepCost, StepCost]:
    """Return the cost of all gradients in bf16 and of LoRA gradients in fp32. `bandwidth` is in bytes per second."""

    def make_cost(what: str, size: float) -> StepCost:
        return StepCost(
            what, int(size), 2 * (world_size - 1) / world_size * size / bandwidth if world_size > 1 else 0.0
        )

    lora = parameters * LORA_SHARE
    full_cost = make_cost(f"{format_count(parameters)} bf16 gradients", 2 * parameters)
    return full_cost, make_cost(f"LoRA ({format_count(lora)}, fp32)", 4 * lora)


def describe_step_costs(parameters: float, world_size: int, bandwidth: float) -> str:
    """Return "1.1 B bf16 gradients over 940 Mbit/s: 25 s/step; LoRA (1.13 M, fp32): 0.051 s"."""
    full, lora = compute_step_costs(parameters, world_size, bandwidth)
    full_time, lora_time = format_step_time(full.seconds), format_step_time(lora.seconds)
    return f"{full.what} over {format_bandwidth(bandwidth)}: {full_time}/step; {lora.what}: {lora_time}"


def format_step_time(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 1:
        return f"{seconds:.2g} s"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_count(parameters: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return f"{parameters:.0f}"


def parse_count(text: str) -> float:
    """Parse 1.1B, 350M or 124000000. Raises ValueError."""
    number = text.strip().replace("_", "").replace(" ", "")
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(number[-1:].lower(), 1.0)
    try:
        count = float(number[:-1] if factor != 1.0 else number) * factor
    except ValueError:
        count = 0.0
    if not 0 < count < 1e15:
        raise ValueError(f"{text!r} is not a number of parameters; write it like 1.1B or 350M")
    return count


def count_parameters(folder: str) -> int:
    """Count the parameters in the safetensors files of a folder. Return 0 if they can't be read."""
    try:
        files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
        return sum(prod(tensor.shape) for file in files for tensor in read_header(file).tensors.values())
    except (OSError, ValueError):
        return 0


# ---- --tune: finds transport settings that help on this network ----
#
# NCCL and gloo mostly choose well. Each setting alternates with the default, and is written to the hosts file only if all
# its rounds beat all rounds of the default and its median is better by more than 3 %.

ROUNDS = 4
TRIAL_REPEATS = 3  # all-reduces per round, of which the median counts
MIN_GAIN = 0.03
TUNED_VARIABLES = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
_VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "tap", "tun")

Say = Callable[[str], None]


@frozen
class Trial:
    """The bus bandwidths of a setting in several rounds, and those of the default measured in alternation with it."""

    env: dict[str, str]
    rates: tuple[float, ...] = ()
    default: tuple[float, ...] = ()
    error: str = ""

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env.items())

    @property
    def gain(self) -> float:
        return median(self.rates) / median(self.default) - 1 if self.rates and self.default else 0.0

    @property
    def helps(self) -> bool:
        return len(self.rates) >= ROUNDS and self.gain > MIN_GAIN and min(self.rates) > max(self.default)


def list_candidates(
    backend: str, used: Mapping[str, str | None], addresses: Mapping[str, Mapping[str, list[str]]]
) -> list[dict[str, str]]:
    """Return the settings to try. `used` maps hosts to their current interface, `addresses` to interface -> addresses.

    An interface is tried if all hosts have it, each with a different address: Docker's bridge has the same on all.
    """
    common = set.intersection(*(set(interfaces) for interfaces in addresses.values())) if addresses else set()
    usable = []
    for name in sorted(common):
        ipv4 = [next((address for address in host[name] if ":" not in address), "") for host in addresses.values()]
        if all(ipv4) and len(set(ipv4)) == len(ipv4) and not name.startswith(_VIRTUAL):
            usable.append(name)
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    settings = [{variable: name} for name in usable if set(used.values()) != {name}]
    if len(usable) > 1:
        settings.append({variable: ",".join(usable)})
    if backend == "nccl":
        pairs = (("2", "2"), ("4", "2"), ("4", "4"), ("8", "4"))
        settings += [{"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets} for threads, sockets in pairs]
        settings += [{"NCCL_ALGO": algorithm} for algorithm in ("Ring", "Tree")]
        settings += [{"NCCL_PROTO": protocol} for protocol in ("Simple", "LL", "LL128")]
    return settings


def tune(batch: ProbeBatch, worker: PendingProbe, facts: ClusterFacts, hosts: Hosts, say: Say) -> list[str]:
    """Try settings, write the best one that helps to the hosts file, and return lines that describe the outcome."""
    if not may_reduce(facts):
        return ["--tune tried nothing, because an all-reduce can't work yet; fix the findings above first"]
    backend = backend_of(facts)
    routes = batch.answers(batch.ask("route", {host.name: {"to": []} for host in facts.reachable}, 5.0), 6.0)
    interfaces = {host.name: host.interface for host in facts.reachable}
    addresses = {name: answer.get("addresses", {}) for name, answer in routes.items()}
    settings = list_candidates(backend, interfaces, addresses)
    if not settings:
        outcome = f"{backend} has no setting to try: only one interface has a route to all hosts"
        return [_write_outcome(hosts, outcome, {})]
    base = {
        name: {key: value for key, value in env.items() if key not in TUNED_VARIABLES or key not in hosts.env}
        for name, env in run_env(facts, hosts).items()
    }
    for host in facts.reachable:
        base[host.name] = {**interface_env(host), **base[host.name]}
    trials = [_try_setting(batch, worker, facts, base, env, say) for env in settings]
    helping = sorted((trial for trial in trials if trial.helps), key=lambda trial: -trial.gain)
    tried = f"{len(trials)} setting{'s' if len(trials) > 1 else ''} tried"
    if not helping:
        return [_write_outcome(hosts, f"{tried}; none helps, so the default stays", {})]
    best = helping[0]
    for trial in helping[1:]:
        if not set(trial.env) & set(best.env):
            combined = _try_setting(batch, worker, facts, base, {**best.env, **trial.env}, say)
            best = combined if combined.helps and combined.gain > best.gain + MIN_GAIN else best
    rates = f"{format_bandwidth(median(best.rates))} instead of {format_bandwidth(median(best.default))}"
    return [_write_outcome(hosts, f"{tried}; {best.name} gives {rates} ({_format_gain(best.gain)})", best.env)]


def _try_setting(
    batch: ProbeBatch, worker: PendingProbe, facts: ClusterFacts, base: Environments, env: dict[str, str], say: Say
) -> Trial:
    """Measure the default and the setting in alternation. Stop after two rounds if the setting is not better."""
    rates: list[float] = []
    default: list[float] = []
    trial = Trial(env)
    for round_number in range(ROUNDS):
        for setting, measured in (({}, default), (env, rates)):
            host_env = {name: {**host_base, **setting} for name, host_base in base.items()}
            reduced = run_all_reduce(batch, worker, facts, host_env, TRIAL_REPEATS)
            if reduced.bus is None:
                trial = Trial(env, tuple(rates), tuple(default), reduced.error)
                say(f"{trial.name if setting else 'the default'} failed: {reduced.error}")
                return trial
            measured.append(reduced.bus)
        trial = Trial(env, tuple(rates), tuple(default))
        if round_number == 1 and trial.gain <= 0:
            break
    verdict = "" if trial.helps else ", no measurable help"
    compared = f"{format_bandwidth(median(trial.rates))}, the default {format_bandwidth(median(trial.default))}"
    say(f"{trial.name}: {compared} ({_format_gain(trial.gain)}{verdict})")
    return trial


def _format_gain(gain: float) -> str:
    return f"{gain:+.1%}" if gain < 1 else f"{gain + 1:.1f} times"


def _write_outcome(hosts: Hosts, outcome: str, best: dict[str, str]) -> str:
    """Replace the settings of an earlier --tune in the hosts file with `best`, and return a line that reports it."""
    env = {**{name: value for name, value in hosts.env.items() if name not in TUNED_VARIABLES}, **best}
    if hosts.path is None or env == hosts.env:
        return f"--tune: {outcome}" + (f" ({hosts.path} already has it)" if best else "")
    write_env(hosts.path, env)
    return f"--tune: {outcome}; " + (
        f"written to {hosts.path}" if best else f"removed the earlier setting from {hosts.path}"
    )


_NOTE = "measured by `stoker cluster check --tune`"
# From `env:` at the start of a line through the indented and empty lines after it.
_ENV_BLOCK = re.compile(r"^env:.*\n?(?:(?:[ \t]+.*|[ \t]*)(?:\n|\Z))*", re.MULTILINE)


def replace_env(text: str, env: dict[str, str]) -> str:
    """Return the text of a hosts file with its `env:` replaced, or removed if `env` is empty.

    Keeps comments outside the block. Raises ValueError if the block can't be replaced without changing the rest.
    """
    content = {key: value for key, value in (parse_yaml(text) or {}).items() if key != "env"}
    content |= {"env": env} if env else {}
    try:
        parse_json(text)
        return json.dumps(content, indent=1) + "\n"
    except ValueError:
        pass  # not JSON: it is YAML, whose comments must stay
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in env.items())
    block = f"env:   # {_NOTE}\n{lines}" if env else ""
    match = _ENV_BLOCK.search(text)
    if match:
        blank = "\n" if match[0].endswith("\n\n") and block else ""
        changed = text[: match.start()] + block + blank + text[match.end() :]
    else:
        changed = text + ("" if text.endswith("\n") or not text else "\n") + block
    try:
        is_correct = (parse_yaml(changed) or {}) == content
    except YamlError:  # such as when the whole file is in one pair of braces
        is_correct = False
    if not is_correct:
        raise ValueError("its env: can't be replaced without changing the rest")
    return changed


def write_env(path: str, env: dict[str, str]) -> None:
    """Replace the `env:` of a hosts file atomically and keep the file's mode. Raises Refusal."""
    try:
        changed = replace_env(read_text(path), env)
        mode = os.stat(path).st_mode & 0o7777
        # The env may contain secrets, so the temporary file must not be readable by others even for a moment.
        with AtomicFile(path, mode=0o600) as file:
            os.fchmod(file.fileno(), mode)
            file.write(changed.encode())
    except ValueError as problem:
        pairs = ", ".join(f"{name}: {value}" for name, value in env.items())
        raise Refusal(f"{path}: {problem}; write env: {{{pairs}}} into it by hand", EX_CONFIG) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
