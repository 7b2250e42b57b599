"""An all-reduce over the hosts with their own torch, one rank a host: what the network gives a training step."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from stoker.contract.errors import EX_CANTCREAT, EX_CONFIG, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import AtomicFile, read_text
from stoker.contract.text import parse_json
from stoker.contract.yaml_text import YamlError, parse_yaml
from stoker.control.cluster.all_reduce_cost import gigabits
from stoker.control.cluster.check_facts import Facts, OneHost, Reduce
from stoker.control.cluster.check_rules import build
from stoker.control.cluster.hosts import Hosts
from stoker.control.cluster.probes import STORE, TIMES, ProbeBatch, Question, fitting

REDUCE_S = 20.0
TARGET_S = 0.12  # what one all-reduce should take: long enough to time, short enough to repeat
REPEATS = 5
TRAVELS = ("NCCL_", "GLOO_", "TORCH_")


def may_reduce(facts: Facts) -> bool:
    """Only where it can end: two hosts, torch on all of them, and every pair lets full packets through."""
    hosts = _able(facts)
    alike = len({build(one) for one in hosts}) == 1
    passing = bool(facts.pairs) and all(not pair.closed and pair.big for pair in facts.pairs)
    return len(hosts) > 1 and len(hosts) == len(facts.there) and alike and passing


def _able(facts: Facts) -> list[OneHost]:
    return [one for one in facts.there if one.address and one.torch and one.torch.version]


def backend_of(facts: Facts) -> str:
    cards = all(
        one.examination and one.examination.machine.gpus and one.torch and one.torch.cuda and one.torch.nccl
        for one in facts.there
    )
    return "nccl" if cards else "gloo"


def interface_env(one: OneHost) -> dict[str, str]:
    return {name: one.interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if one.interface}


def run_env(facts: Facts, hosts: Hosts) -> dict[str, dict[str, str]]:
    """What a run's ranks would get, by host."""
    travels = {name: value for name, value in os.environ.items() if name.startswith(TRAVELS)}
    return {one.name: {**interface_env(one), **hosts.env, **travels} for one in facts.there}


def reduce(
    asking: ProbeBatch, worker: Question, facts: Facts, env: Mapping[str, Mapping[str, str]], repeats: int = REPEATS
) -> Reduce:
    """`worker`: the open question to each host's torch. Rank 0's store takes a free port; the others are told."""
    hosts, backend = _able(facts), backend_of(facts)
    orders = {
        one.name: {
            "do": "reduce",
            "rank": rank,
            "world": len(hosts),
            "address": hosts[0].address,
            "backend": backend,
            "seconds": REDUCE_S,
            "target": TARGET_S,
            "repeats": repeats,
            "env": {**env[one.name], **_card(one, backend)},
        }
        for rank, one in enumerate(hosts)
    }
    said = {name: len(worker.more[name]) for name in orders}
    first, *others = orders
    asking.tell(worker, {first: orders[first]})
    store = fitting(STORE, _next(asking, worker, first, said[first]), "its store")
    if "port" not in store:
        return Reduce(len(hosts), backend, error=f"{first}: {store.get('error', 'no store')}")
    said[first] += 1
    asking.tell(worker, {name: {**orders[name], "port": store["port"]} for name in others})
    words = {name: fitting(TIMES, _next(asking, worker, name, said[name]), "its times") for name in orders}
    failed = {name: word for name, word in words.items() if not word.get("times") or min(word["times"]) <= 0}
    wrong = [f"{name}: {word.get('error', 'no times')}" for name, word in failed.items()]
    if wrong:
        return Reduce(len(hosts), backend, error="; ".join(wrong[:3]))
    return Reduce(len(hosts), backend, words[first]["bytes"], tuple(words[first]["times"]))


def _next(asking: ProbeBatch, worker: Question, name: str, said: int) -> dict[str, Any]:
    asking.wait(REDUCE_S + 3.0, lambda host: len(worker.more[host]) > said or host in worker.answers, [name])
    more = worker.more[name]
    found: dict[str, Any] = more[said] if len(more) > said else worker.answers.get(name) or {"error": "no answer"}
    return found


def _card(one: OneHost, backend: str) -> dict[str, str]:
    """The card with the most free memory."""
    there = one.examination.machine.gpus if one.examination and backend == "nccl" else ()
    gpus = [gpu for gpu in there if not gpu.error]
    if not gpus:
        return {}
    freest = max(gpus, key=lambda gpu: gpu.memory_free or 0)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": freest.uuid}


# ---- which transport settings help on this network ----
#
# Measured, not believed: each alternates with the default, medians are compared. What NCCL and gloo choose is mostly
# right; a setting stays only if every one of its rounds beats every one of the default's, and the median by over 3 %.

ROUNDS = 4
TRIAL_REPEATS = 3  # all-reduces a round; their median counts
GAIN = 0.03
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
OURS = (*_INTERFACES, "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_ALGO", "NCCL_PROTO")
_VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "tap", "tun")

Say = Callable[[str], None]


@frozen
class Trial:
    """A setting and the bus bandwidths of its rounds, beside the default's of the same minutes."""

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
        return len(self.rates) >= ROUNDS and self.gain > GAIN and min(self.rates) > max(self.default)


def candidates(
    backend: str, used: Mapping[str, str | None], addresses: Mapping[str, Mapping[str, list[str]]]
) -> list[dict[str, str]]:
    """`used`: each host's interface; one counts if all hosts have it with their own address, unlike Docker's bridge."""
    found: list[dict[str, str]] = []
    shared = set.intersection(*(set(one) for one in addresses.values())) if addresses else set()
    ways = []
    for name in sorted(shared):
        first = [next((address for address in one[name] if ":" not in address), "") for one in addresses.values()]
        if all(first) and len(set(first)) == len(first) and not name.startswith(_VIRTUAL):
            ways.append(name)
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    found += [{variable: name} for name in ways if set(used.values()) != {name}]
    if len(ways) > 1:
        found.append({variable: ",".join(ways)})
    if backend == "nccl":
        pairs = (("2", "2"), ("4", "2"), ("4", "4"), ("8", "4"))
        found += [{"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets} for threads, sockets in pairs]
        found += [{"NCCL_ALGO": algorithm} for algorithm in ("Ring", "Tree")]
        found += [{"NCCL_PROTO": protocol} for protocol in ("Simple", "LL", "LL128")]
    return found


def tune(asking: ProbeBatch, worker: Question, facts: Facts, hosts: Hosts, say: Say) -> list[str]:
    """Tries, keeps what helps in the hosts file, and says what came of it."""
    if not may_reduce(facts):
        return ["--tune: nothing was tried: no all-reduce is possible yet, see above"]
    backend = backend_of(facts)
    routes = asking.answers(asking.ask("route", {one.name: {"to": []} for one in facts.there}, 5.0), 6.0)
    interfaces = {one.name: one.interface for one in facts.there}
    addresses = {name: answer.get("addresses", {}) for name, answer in routes.items()}
    options = candidates(backend, interfaces, addresses)
    if not options:
        nothing = (
            "has nothing to choose here: one interface leads to all hosts, and it has no other setting that matters"
        )
        return [_outcome(hosts, f"{backend} {nothing}", {})]
    base = {
        name: {key: value for key, value in env.items() if key not in OURS or key not in hosts.env}
        for name, env in run_env(facts, hosts).items()
    }
    for one in facts.there:
        base[one.name] = {**interface_env(one), **base[one.name]}
    trials = [_try(asking, worker, facts, base, env, say) for env in options]
    helping = sorted((trial for trial in trials if trial.helps), key=lambda trial: -trial.gain)
    kept = helping[0] if helping else None
    for more in helping[1:]:
        if kept and not set(more.env) & set(kept.env):
            both = _try(asking, worker, facts, base, {**kept.env, **more.env}, say)
            kept = both if both.helps and both.gain > kept.gain + GAIN else kept
    tried = f"{len(trials)} setting{'s' if len(trials) > 1 else ''} tried"
    if kept is None:
        return [_outcome(hosts, f"{tried}, none helps: the default stays", {})]
    instead = f"{gigabits(median(kept.rates))} instead of {gigabits(median(kept.default))}"
    gives = f"{kept.name} gives {instead} ({_more(kept.gain)})"
    return [_outcome(hosts, f"{tried}; {gives}", kept.env)]


def _more(gain: float) -> str:
    return f"{gain:+.1%}" if gain < 1 else f"{gain + 1:.1f} times"


def _outcome(hosts: Hosts, said: str, kept: dict[str, str]) -> str:
    env = {**{name: value for name, value in hosts.env.items() if name not in OURS}, **kept}
    if hosts.path is None or env == hosts.env:
        return f"--tune: {said}" + (f" ({hosts.path} has it already)" if kept else "")
    keep(hosts.path, env)
    return f"--tune: {said}; " + (f"kept in {hosts.path}" if kept else f"what {hosts.path} had of it is removed")


def _try(
    asking: ProbeBatch, worker: Question, facts: Facts, base: Mapping[str, Mapping[str, str]], env: dict[str, str], say: Say
) -> Trial:
    """Default, setting, default, setting ... A setting that is no better after two rounds gets no more."""
    rates: list[float] = []
    default: list[float] = []
    trial = Trial(env)
    for number in range(ROUNDS):
        for given, into in (({}, default), (env, rates)):
            found = reduce(asking, worker, facts, {name: {**one, **given} for name, one in base.items()}, TRIAL_REPEATS)
            if found.bus is None:
                trial = Trial(env, tuple(rates), tuple(default), found.error)
                say(f"{trial.name}: fails: {found.error}" if given else f"the default fails: {found.error}")
                return trial
            into.append(found.bus)
        trial = Trial(env, tuple(rates), tuple(default))
        if number == 1 and trial.gain <= 0:
            break
    no = "" if trial.helps else ", no measurable help"
    made = f"{gigabits(median(trial.rates))}, the default {gigabits(median(trial.default))}"
    say(f"{trial.name}: {made} ({_more(trial.gain)}{no})")
    return trial


_NOTE = "measured by `stoker cluster check --tune`"
# From `env:` at the start of a line to the next line that begins with neither a space nor the block's comment.
_BLOCK = re.compile(r"^env:.*\n?(?:(?:[ \t]+.*|[ \t]*)(?:\n|\Z))*", re.MULTILINE)


def with_env(text: str, env: dict[str, str]) -> str:
    """The file's text with this and no other env; without the block where env is empty."""
    wanted = {key: value for key, value in (parse_yaml(text) or {}).items() if key != "env"}
    wanted |= {"env": env} if env else {}
    try:
        parse_json(text)
        return json.dumps(wanted, indent=1) + "\n"
    except ValueError:
        pass  # not JSON: YAML, with comments worth keeping
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in env.items())
    block = f"env:   # {_NOTE}\n{lines}" if env else ""
    found = _BLOCK.search(text)
    if found:
        blank = "\n" if found[0].endswith("\n\n") and block else ""
        after = text[: found.start()] + block + blank + text[found.end() :]
    else:
        after = text + ("" if text.endswith("\n") or not text else "\n") + block
    try:
        right = (parse_yaml(after) or {}) == wanted
    except YamlError:  # a file in one pair of braces
        right = False
    if not right:
        raise ValueError("its env: can't be replaced without touching the rest")
    return after


def keep(path: str, env: dict[str, str]) -> None:
    """Writes it, whole or not at all."""
    try:
        changed = with_env(read_text(path), env)
        mode = os.stat(path).st_mode & 0o7777
        with AtomicFile(path, mode=0o600) as file:  # its env may hold secrets: who opens it now could read them later
            os.fchmod(file.fileno(), mode)
            file.write(changed.encode())
    except ValueError as problem:
        lines = ", ".join(f"{name}: {value}" for name, value in env.items())
        raise Refusal(f"{path}: {problem}; write it yourself: env: {{{lines}}}", EX_CONFIG) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
