"""--notify: who is told that a run ended or restarts. A message goes through a child of its own: a service that is slow,
or down, holds nobody up, and its failure is reported and changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen
from stoker.contract.masking import mask_json
from stoker.contract.text import escape
from stoker.control.launch.children import own_program

NOTIFY_S = 30.0
NTFY, SLACK, DISCORD, MAIL, COMMAND = "ntfy", "slack", "discord", "mail", "command"
_KINDS = "ntfy://TOPIC, https://HOST/TOPIC, slack:URL, discord:URL, mailto:ADDRESS or a shell command"
_WEB = ("http://", "https://")
_ADDRESS = re.compile(r"[^\s,;<>\"'()\\-][^\s,;<>\"'()\\]*")


@frozen
class Target:
    kind: str
    to: str  # a URL, addresses separated by commas, or the command


def target(told: str) -> Target:
    """Refusal for what looks like a target and can't be one."""
    scheme, _, rest = told.partition(":")
    if told.startswith("ntfy://"):
        place = rest.strip("/")
        return Target(NTFY, _url(told, f"https://{place if '/' in place else f'ntfy.sh/{place}'}"))
    if scheme in (SLACK, DISCORD):
        return Target(scheme, _url(told, rest))
    if scheme == "mailto":
        addresses = rest.split(",")
        if not all(_ADDRESS.fullmatch(address) for address in addresses):
            raise Refusal(f"--notify {told}: no address; write mailto:me@example.org", EX_USAGE)
        return Target(MAIL, rest)
    if told.startswith(_WEB):
        return Target(_service(told), _url(told, told))
    if re.match(r"[a-z][a-z0-9+.-]*://", told):
        raise Refusal(f"--notify {scheme}://: unknown; known: {_KINDS}", EX_USAGE)
    return Target(COMMAND, told)


def secret_of(told: str) -> str:
    """What lets anybody post there: the part of a URL behind its host; of ntfy://TOPIC the topic."""
    try:
        meant = target(told)
    except Refusal:
        return ""
    return meant.to.partition("://")[2].partition("/")[2] if meant.kind in (NTFY, SLACK, DISCORD) else ""


def _service(url: str) -> str:
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0].lower()
    if host.endswith("hooks.slack.com"):
        return SLACK
    return DISCORD if host.endswith(("discord.com", "discordapp.com")) and "/api/webhooks/" in url else NTFY


def _url(told: str, url: str) -> str:
    host, _, path = url.partition("://")[2].partition("/")
    if not url.startswith(_WEB) or not host or not path or not url.isprintable() or " " in url:
        raise Refusal(f"--notify {told.partition(':')[0]}: needs a URL with a path; known: {_KINDS}", EX_USAGE)
    return url


class _Sent:
    """A message under way."""

    def __init__(self, child: subprocess.Popen[bytes], errors: int, last: bool) -> None:
        self.child, self.errors, self.last = child, errors, last


class Notifier:
    """`say`: the launcher's, told what fails."""

    def __init__(self, told: str, say: Callable[[str], None]) -> None:
        self._target = target(told)
        self._say = say
        self._sent: list[_Sent] = []

    def tell(self, verdict: Verdict, what: str, run_dir: str) -> None:
        """`what`: ended, restarting or refused. A user who stopped a run knows; a command is told all the same."""
        asked = self._target.kind == COMMAND
        if verdict.cause == "launch.stopped" and not asked:
            return
        shown = mask_json(verdict.to_json())
        if asked:
            argv, message = ["/bin/sh", "-c", self._target.to], shown
        else:
            argv = own_program("stoker.control.show.notification", "entry")
            to = {"kind": self._target.kind, "to": self._target.to}
            message = {"target": to, "verdict": shown, "what": what, "run_dir": run_dir, "seconds": NOTIFY_S}
        env = {**os.environ, "STOKER_NOTIFY": what, "STOKER_RUN_ID": verdict.run} if asked else dict(os.environ)
        try:
            self._sent.append(_Sent(*_start(argv, message, env), what != "restarting"))
        except OSError as problem:
            self._say(f"stoker: --notify failed: {problem}")

    def close(self) -> None:
        """Waits for what is under way: for a command that was told of a restart only as long as for the others."""
        until = time.monotonic() + NOTIFY_S
        command = self._target.kind == COMMAND
        for sent in sorted(self._sent, key=lambda one: not one.last):
            wait = max(0.0, until - time.monotonic()) if sent.last or not command else 0.0
            try:
                code = sent.child.wait(wait)
                if code:
                    errors = escape(_end_of(sent.errors))
                    ended = f" ended with {code}" if command else ""
                    self._say(f"stoker: --notify{ended}: {errors}")
            except subprocess.TimeoutExpired:
                self._late(sent, command)
            os.close(sent.errors)
        self._sent.clear()

    def _late(self, sent: _Sent, command: bool) -> None:
        if not command:
            sent.child.kill()
            sent.child.wait()
            self._say(f"stoker: --notify: {self._target.kind} did not answer within {NOTIFY_S:.0f} s")
        elif sent.last:
            self._say(f"stoker: --notify did not end within {NOTIFY_S:.0f} s; it is left running")


def _end_of(errors: int) -> str:
    """What it said last. It may quote a server's answer."""
    start = max(0, os.fstat(errors).st_size - 4096)
    return os.pread(errors, 4096, start).decode("utf-8", "replace").strip()[-200:]


def _start(argv: list[str], message: Any, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    errors = os.memfd_create("errors")
    # Not a pipe, which blocks the writer until somebody reads; not on a disk, which may be full just then.
    with os.fdopen(os.memfd_create("verdict"), "w+b") as text:
        text.write(json.dumps(message).encode())
        text.seek(0)
        try:
            child = subprocess.Popen(
                argv, stdin=text, stdout=subprocess.DEVNULL, stderr=errors, env=env, start_new_session=True
            )
        except OSError:
            os.close(errors)
            raise
    return child, errors
