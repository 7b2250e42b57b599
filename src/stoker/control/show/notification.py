"""Sends one line about a run to ntfy, Slack, Discord or by mail. Runs in a separate process that gets its job as JSON on stdin.

Every failure is one line on stderr that names the service and its host. It omits the rest of a URL, which is a secret.
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

_TIMEOUT_S = 10.0  # for connecting, and for each read
_SENDMAIL_S = 25  # sendmail must end within this time
_MAX_SUMMARY = 400  # characters
_MAX_SUBJECT = 200
_MAX_DISCORD = 2000  # characters that Discord accepts
_TAGS = {"completed": "white_check_mark", "failed": "rotating_light"}  # ntfy's; any other state gets "warning"


class NotificationError(Exception):
    """A message could not be sent; the text is one line for the user."""


def entry() -> None:
    """Send the message that stdin describes; exit with 1 if that fails."""
    job = json.loads(sys.stdin.buffer.read())
    kind, address = job["target"]["kind"], job["target"]["to"]
    _exit_after(job["seconds"], kind)
    verdict = Verdict.from_json(job["verdict"])
    state = job["what"] if job["what"] == "restarting" else verdict.status
    text = format_line(verdict, state, job["run_dir"])
    try:
        if kind == "mail":
            mail(address, text, verdict, state)
        else:
            post(kind, address, text, state)
    except NotificationError as problem:
        print(escape(str(problem)), file=sys.stderr)
        sys.exit(1)


def _exit_after(seconds: float, kind: str) -> None:
    """End this process after `seconds` with a line on stderr.

    Raising an exception would hang: smtplib handles it by sending QUIT to the server that is not responding.
    """

    def on_alarm(_number: int, _frame: object) -> None:
        os.write(2, f"{kind} did not answer within {seconds:.0f} s\n".encode())
        os._exit(1)

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def format_line(verdict: Verdict, state: str, run_dir: str) -> str:
    """Return one line with the run's name, state, step, reward or loss, cause, and the command that shows more."""
    run = _read_view(run_dir)
    name = (run.name if run is not None else "") or verdict.run or "a run"
    parts = [f"{name} {'is restarting' if state == 'restarting' else state}"]
    if run is not None and run.step is not None:
        total = f"/{run.total_steps}" if run.total_steps is not None else ""
        parts.append(f"step {run.step}{total}")
    if run is not None and run.headline_value is not None:
        number = finite(run.headline_value)
        parts.append(f"{run.headline} {run.headline_value if number is None else f'{number:.4g}'}")
    if verdict.status != "completed":
        parts.append(f"{escape(verdict.summary, _MAX_SUMMARY)} [{verdict.cause}]")
    host = f"on {os.uname().nodename}"
    parts.append(f"{host}: stoker why {shlex.quote(os.path.abspath(run_dir))}" if run_dir else host)
    return escape("; ".join(parts))


def _read_view(run_dir: str) -> RunView | None:
    """Read the run directory. Returns None if it is missing or damaged; the message then has no step and no loss."""
    if not run_dir:
        return None
    try:
        record = run_record.read_run(run_dir)
    except (run_record.DamagedRecord, Refusal, OSError):
        return None
    return open_run_tail(record).view(time.time(), watched=True) if record is not None else None


# ---- HTTP ----


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a message goes only to the URL that the user gave."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def post(kind: str, url: str, text: str, state: str) -> None:
    """Post the line to ntfy, Slack or Discord. Raises NotificationError if that fails."""
    try:
        address = urllib.parse.urlsplit(url)
    except ValueError:  # http://[::1
        raise NotificationError(f"{kind}: the URL of --notify has an invalid host") from None
    headers = {"User-Agent": "stoker"}
    user, at, host = address.netloc.rpartition("@")
    if at:
        import base64

        basic = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {basic}"
        address = address._replace(netloc=host)
    body, body_headers = _encode_body(kind, text, state)
    request = urllib.request.Request(address.geturl(), body, {**headers, **body_headers}, method="POST")
    service = f"{kind} at {host}"
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            response.read(1024)
    except urllib.error.HTTPError as problem:
        raise NotificationError(f"{service} answered {problem.code} {problem.reason}") from None
    except urllib.error.URLError as problem:
        raise NotificationError(f"{service} can't be reached: {problem.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as problem:
        # The connection ended within the response, the host name is invalid, or the response is not HTTP.
        raise NotificationError(f"{service}: {type(problem).__name__}: {problem}") from None


def _encode_body(kind: str, text: str, state: str) -> tuple[bytes, dict[str, str]]:
    if kind == "slack":
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps({"text": escaped}).encode(), {"Content-Type": "application/json"}
    if kind == "discord":
        # Text that a run printed may contain @everyone, which must not notify anyone.
        message = {"content": text[:_MAX_DISCORD], "allowed_mentions": {"parse": []}}
        return json.dumps(message).encode(), {"Content-Type": "application/json"}
    tags = {"Tags": _TAGS.get(state, "warning"), "Priority": "high" if state == "failed" else "default"}
    return text.encode(), {"Content-Type": "text/plain; charset=utf-8", **tags}


# ---- mail ----


def mail(to: str, text: str, verdict: Verdict, state: str) -> None:
    """Mail the line and the verdict's fixes through $STOKER_SMTP if it is set, else through sendmail.

    Raises NotificationError if that fails.
    """
    from email.message import EmailMessage

    message = EmailMessage()
    message["To"] = to
    message["Subject"] = escape(f"stoker: {text.partition(';')[0]} [{verdict.cause}]", _MAX_SUBJECT)
    fixes = [escape(fix) for fix in verdict.fix] if state not in ("completed", "restarting") else []
    message.set_content("\n".join([text, *(f"→ {fix}" for fix in fixes)]) + "\n")
    server = os.environ.get("STOKER_SMTP")
    if server:
        _send_by_smtp(server, message)
    else:
        _send_by_sendmail(to.split(","), message.as_bytes())


def _send_by_sendmail(addresses: list[str], message: bytes) -> None:
    import shutil
    import subprocess

    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/lib"))
    program = shutil.which("sendmail", path=path)
    if program is None:
        raise NotificationError(
            "mail: this machine has no sendmail program; install one (msmtp-mta, postfix), or set"
            " STOKER_SMTP=smtp://user:password@host:587"
        )
    command = [program, "-i", *addresses]
    try:
        done = subprocess.run(command, input=message, capture_output=True, timeout=_SENDMAIL_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotificationError(f"mail: sendmail did not end within {_SENDMAIL_S} s") from None
    except OSError as problem:
        raise NotificationError(f"mail: {program}: {problem.strerror}") from None
    if done.returncode:
        output = done.stderr.decode("utf-8", "replace").strip()[-150:]
        raise NotificationError(f"mail: sendmail ended with {done.returncode}: {output}")


def _send_by_smtp(server: str, message: Any) -> None:
    import smtplib
    import ssl

    address = urllib.parse.urlsplit(server if "://" in server else f"smtp://{server}")
    host, user = address.hostname or "", urllib.parse.unquote(address.username or "")
    service = f"mail: {host}"
    try:
        port = address.port
    except ValueError:
        port = -1
    if address.scheme not in ("smtp", "smtps") or not host or port == -1:
        raise NotificationError(
            "mail: STOKER_SMTP must be smtp://user:password@host:587 or smtps://user:password@host:465"
        )
    message["From"] = user if "@" in user else f"stoker@{os.uname().nodename}"
    context = ssl.create_default_context()
    is_encrypted = address.scheme == "smtps"
    try:
        client: smtplib.SMTP
        if is_encrypted:
            client = smtplib.SMTP_SSL(host, port or 465, timeout=_TIMEOUT_S, context=context)
        else:
            client = smtplib.SMTP(host, port or (587 if user else 25), timeout=_TIMEOUT_S)
        with client:
            client.ehlo_or_helo_if_needed()
            if not is_encrypted and client.has_extn("starttls"):
                client.starttls(context=context)
                is_encrypted = True
            if user:
                if not is_encrypted:
                    raise NotificationError(f"{service} offers no encryption: the password is not sent")
                client.login(user, urllib.parse.unquote(address.password or ""))
            client.send_message(message)
    except (smtplib.SMTPException, OSError, ValueError) as problem:  # a challenge that is not base64 raises ValueError
        raise NotificationError(f"{service}: {type(problem).__name__}: {problem}") from None
