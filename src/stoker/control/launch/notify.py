"""Implements --notify: sends a message to a service, an address or a command when a run ends or restarts.

A child process sends each message, so that a slow service doesn't delay the run. A failure is only reported.
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
from stoker.control.launch.children import module_command

NOTIFY_S = 30.0
NTFY, SLACK, DISCORD, MAIL, COMMAND = "ntfy", "slack", "discord", "mail", "command"
_FORMS = "ntfy://TOPIC, https://HOST/TOPIC, slack:URL, discord:URL, mailto:ADDRESS or a shell command"
_WEB = ("http://", "https://")
_ADDRESS = re.compile(r"[^\s,;<>\"'()\\-][^\s,;<>\"'()\\]*")


@frozen
class NotifyTarget:
    """The receiver of --notify."""

    kind: str
    to: str  # a URL, addresses separated by commas, or the command


def parse_target(text: str) -> NotifyTarget:
    """Parse --notify. Raises Refusal for a URL of an unknown service or a bad address."""
    scheme, _, rest = text.partition(":")
    if text.startswith("ntfy://"):
        topic = rest.strip("/")
        return NotifyTarget(NTFY, _check_url(text, f"https://{topic if '/' in topic else f'ntfy.sh/{topic}'}"))
    if scheme in (SLACK, DISCORD):
        return NotifyTarget(scheme, _check_url(text, rest))
    if scheme == "mailto":
        if not all(_ADDRESS.fullmatch(address) for address in rest.split(",")):
            raise Refusal(f"--notify {text} is not an email address; write mailto:me@example.org", EX_USAGE)
        return NotifyTarget(MAIL, rest)
    if text.startswith(_WEB):
        return NotifyTarget(_kind_of_url(text), _check_url(text, text))
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        raise Refusal(f"--notify {scheme}:// is not supported; use {_FORMS}", EX_USAGE)
    return NotifyTarget(COMMAND, text)


def find_secret_path(text: str) -> str:
    """Return the secret part of --notify, the path of a URL or the topic, or "" if it has none."""
    try:
        target = parse_target(text)
    except Refusal:
        return ""
    return target.to.partition("://")[2].partition("/")[2] if target.kind in (NTFY, SLACK, DISCORD) else ""


def _kind_of_url(url: str) -> str:
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0].lower()
    if host.endswith("hooks.slack.com"):
        return SLACK
    is_discord = host.endswith(("discord.com", "discordapp.com")) and "/api/webhooks/" in url
    return DISCORD if is_discord else NTFY


def _check_url(text: str, url: str) -> str:
    host, _, path = url.partition("://")[2].partition("/")
    if not url.startswith(_WEB) or not host or not path or not url.isprintable() or " " in url:
        raise Refusal(f"--notify {text.partition(':')[0]} needs a URL with a path; use {_FORMS}", EX_USAGE)
    return url


class _MessageProcess:
    """A child that sends a message. `is_last` is set for the message about the run's end."""

    def __init__(self, child: subprocess.Popen[bytes], errors: int, is_last: bool) -> None:
        self.child = child
        self.errors = errors
        self.is_last = is_last


class Notifier:
    """Sends the messages of one run."""

    def __init__(self, text: str, log: Callable[[str], None]) -> None:
        self._target = parse_target(text)
        self._is_command = self._target.kind == COMMAND
        self._log = log
        self._sendings: list[_MessageProcess] = []

    def send(self, verdict: Verdict, what: str, run_dir: str) -> None:
        """Send the verdict. `what` is ended, restarting or refused. Only a command is told of a stop by the user."""
        if verdict.cause == "launch.stopped" and not self._is_command:
            return
        message = mask_json(verdict.to_json())
        env = dict(os.environ)
        if self._is_command:
            argv = ["/bin/sh", "-c", self._target.to]
            env |= {"STOKER_NOTIFY": what, "STOKER_RUN_ID": verdict.run}
        else:
            argv = module_command("stoker.control.show.notification", "entry")
            target = {"kind": self._target.kind, "to": self._target.to}
            message = {"target": target, "verdict": message, "what": what, "run_dir": run_dir, "seconds": NOTIFY_S}
        try:
            child, errors = _start(argv, message, env)
        except OSError as problem:
            self._log(f"stoker: --notify failed: {problem}")
            return
        self._sendings.append(_MessageProcess(child, errors, what != "restarting"))

    def close(self) -> None:
        """Wait for the messages that are being sent. Commands that were started for a restart are not waited for."""
        deadline = time.monotonic() + NOTIFY_S
        for sending in sorted(self._sendings, key=lambda sending: not sending.is_last):
            waits = sending.is_last or not self._is_command
            try:
                code = sending.child.wait(max(0.0, deadline - time.monotonic()) if waits else 0.0)
                if code:
                    ended = f" ended with {code}" if self._is_command else ""
                    self._log(f"stoker: --notify{ended}: {escape(_read_end(sending.errors))}")
            except subprocess.TimeoutExpired:
                self._give_up(sending)
            os.close(sending.errors)
        self._sendings.clear()

    def _give_up(self, sending: _MessageProcess) -> None:
        if not self._is_command:
            sending.child.kill()
            sending.child.wait()
            self._log(f"stoker: --notify: {self._target.kind} did not respond within {NOTIFY_S:.0f} s")
        elif sending.is_last:
            self._log(f"stoker: --notify did not end within {NOTIFY_S:.0f} s; it is left running")


def _read_end(errors: int) -> str:
    """Return the end of a child's stderr, which may quote a server's response."""
    start = max(0, os.fstat(errors).st_size - 4096)
    return os.pread(errors, 4096, start).decode("utf-8", "replace").strip()[-200:]


def _start(argv: list[str], message: Any, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a child with the message as its stdin. Returns it with the file of its stderr."""
    errors = os.memfd_create("errors")
    # A pipe would block the writer until it is read, and the disk of a file may be full.
    with os.fdopen(os.memfd_create("verdict"), "w+b") as stdin:
        stdin.write(json.dumps(message).encode())
        stdin.seek(0)
        try:
            child = subprocess.Popen(
                argv, stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors, env=env, start_new_session=True
            )
        except OSError:
            os.close(errors)
            raise
    return child, errors
