"""One readable line about a run, sent to ntfy, Slack, Discord or by mail. A program of its own: a JSON object on stdin.

Whatever fails becomes one line on stderr that names the service and its host, and never the rest of a URL.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.show.job_view import open_run_tail
from stoker.control.show.snapshot import RunView, finite

_ANSWER_S = 10.0  # for a connection, and for each part of an answer
_SUMMARY = 400  # characters
_SUBJECT = 200
_DISCORD = 2000  # characters it takes
_TAGS = {"completed": "white_check_mark", "failed": "rotating_light"}  # else a warning sign


class NotificationError(Exception):
    """In words for the user."""


def entry() -> None:
    told = json.loads(sys.stdin.buffer.read())
    _end_after(told["seconds"], told["target"]["kind"])
    verdict = Verdict.from_json(told["verdict"])
    state = told["what"] if told["what"] == "restarting" else verdict.status
    text = format_line(verdict, state, told["run_dir"])
    kind, to = told["target"]["kind"], told["target"]["to"]
    try:
        if kind == "mail":
            mail(to, text, verdict, state)
        else:
            post(kind, to, text, state)
    except NotificationError as problem:
        print(escape(str(problem)), file=sys.stderr)
        sys.exit(1)


def _end_after(seconds: float, kind: str) -> None:
    """End this process after so many seconds, with a line on stderr.

    Not by an exception: smtplib answers one by saying goodbye to the server, which may be what it waits for.
    """

    def end(_number: int, _frame: object) -> None:
        os.write(2, f"{kind} did not answer within {seconds:.0f} s\n".encode())
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def format_line(verdict: Verdict, state: str, run_dir: str) -> str:
    """Return one line with the run, its state, step, reward or loss, its cause and the command that shows more."""
    run = _run(run_dir)
    name = (run.name if run is not None else "") or verdict.run or "a run"
    parts = [f"{name} {'is restarting' if state == 'restarting' else state}"]
    if run is not None and run.step is not None:
        total = f"/{run.total_steps}" if run.total_steps is not None else ""
        parts.append(f"step {run.step}{total}")
    if run is not None and run.headline_value is not None:
        number = finite(run.headline_value)
        parts.append(f"{run.headline} {run.headline_value if number is None else f'{number:.4g}'}")
    if verdict.status != "completed":
        parts.append(f"{escape(verdict.summary, _SUMMARY)} [{verdict.cause}]")
    where = f"on {os.uname().nodename}"
    look = f"{where}: stoker why {shlex.quote(os.path.abspath(run_dir))}" if run_dir else where
    return escape("; ".join([*parts, look]))


def _run(run_dir: str) -> RunView | None:
    """What its folder says now; a damaged one costs the step and the loss."""
    if not run_dir:
        return None
    try:
        record = run_record.read_run(run_dir)
    except (run_record.Damaged, Refusal, OSError):
        return None
    return open_run_tail(record).run(time.time(), watched=True) if record is not None else None


# ---- by HTTP ----


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message goes where the user said and nowhere else."""

    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        return None


def post(kind: str, url: str, text: str, state: str) -> None:
    try:
        address = urllib.parse.urlsplit(url)
    except ValueError:  # [::1
        raise NotificationError(f"{kind}: the URL of --notify has no host that can be one") from None
    headers = {"User-Agent": "stoker"}
    user, at, host = address.netloc.rpartition("@")
    if at:
        import base64

        basic = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {basic}"
        address = address._replace(netloc=host)
    body, more = _body(kind, text, state)
    request = urllib.request.Request(address.geturl(), body, {**headers, **more}, method="POST")
    service = f"{kind} at {host}"
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=_ANSWER_S) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as problem:
        raise NotificationError(f"{service} answered {problem.code} {problem.reason}") from None
    except urllib.error.URLError as problem:
        raise NotificationError(f"{service} can't be reached: {problem.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as problem:
        # A connection that ends within the answer; a host that can't be one; an answer that is no HTTP.
        raise NotificationError(f"{service}: {type(problem).__name__}: {problem}") from None


def _body(kind: str, text: str, state: str) -> tuple[bytes, dict[str, str]]:
    if kind == "slack":
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps({"text": escaped}).encode(), {"Content-Type": "application/json"}
    if kind == "discord":
        # What a run printed may hold @everyone.
        message = {"content": text[:_DISCORD], "allowed_mentions": {"parse": []}}
        return json.dumps(message).encode(), {"Content-Type": "application/json"}
    tags = {"Tags": _TAGS.get(state, "warning"), "Priority": "high" if state == "failed" else "default"}
    return text.encode(), {"Content-Type": "text/plain; charset=utf-8", **tags}


# ---- by mail ----


def mail(to: str, text: str, verdict: Verdict, state: str) -> None:
    from email.message import EmailMessage

    message = EmailMessage()
    message["To"] = to
    message["Subject"] = escape(f"stoker: {text.partition(';')[0]} [{verdict.cause}]", _SUBJECT)
    fixes = [escape(fix) for fix in verdict.fix] if state not in ("completed", "restarting") else []
    message.set_content("\n".join([text, *(f"→ {fix}" for fix in fixes)]) + "\n")
    server = os.environ.get("STOKER_SMTP")
    if server:
        _by_smtp(server, message)
    else:
        _by_sendmail(to.split(","), message.as_bytes())


def _by_sendmail(addresses: list[str], message: bytes) -> None:
    import shutil
    import subprocess

    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/lib"))
    program = shutil.which("sendmail", path=folders)
    if program is None:
        raise NotificationError(
            "mail: no sendmail program here; install one (msmtp-mta, postfix), or set"
            " STOKER_SMTP=smtp://user:password@host:587"
        )
    try:
        done = subprocess.run([program, "-i", *addresses], input=message, capture_output=True, timeout=25, check=False)
    except subprocess.TimeoutExpired:
        raise NotificationError("mail: sendmail did not end within 25 s") from None
    except OSError as problem:
        raise NotificationError(f"mail: {program}: {problem.strerror}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-150:]
        raise NotificationError(f"mail: sendmail ended with {done.returncode}: {said}")


def _by_smtp(told: str, message: Any) -> None:
    import smtplib
    import ssl

    address = urllib.parse.urlsplit(told if "://" in told else f"smtp://{told}")
    host, user = address.hostname or "", urllib.parse.unquote(address.username or "")
    service = f"mail: {host}"
    try:
        port = address.port
    except ValueError:
        port = -1
    if address.scheme not in ("smtp", "smtps") or not host or port == -1:
        raise NotificationError(
            "mail: STOKER_SMTP is not smtp://user:password@host:587 or smtps://user:password@host:465"
        )
    message["From"] = user if "@" in user else f"stoker@{os.uname().nodename}"
    secure = ssl.create_default_context()

    def connected() -> smtplib.SMTP:
        if address.scheme == "smtps":
            return smtplib.SMTP_SSL(host, port or 465, timeout=_ANSWER_S, context=secure)
        return smtplib.SMTP(host, port or (587 if user else 25), timeout=_ANSWER_S)

    try:
        with connected() as made:
            made.ehlo_or_helo_if_needed()
            encrypted = address.scheme == "smtps"
            if not encrypted and made.has_extn("starttls"):
                made.starttls(context=secure)
                encrypted = True
            if user:
                if not encrypted:
                    raise NotificationError(f"{service} offers no encryption: the password is not sent")
                made.login(user, urllib.parse.unquote(address.password or ""))
            made.send_message(message)
    except (smtplib.SMTPException, OSError, ValueError) as problem:  # ValueError: a challenge that is no base64
        raise NotificationError(f"{service}: {type(problem).__name__}: {problem}") from None
