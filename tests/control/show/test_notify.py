"""--notify to ntfy, Slack, Discord and by mail: real servers on loopback, a sendmail program, and real runs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import socketserver
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.control.launch import notify
from stoker.control.launch.children import module_command
from stoker.control.launch.notify import Notifier, NotifyTarget, parse_target

BOOM = """import json, os
with open(os.path.join(os.environ["STOKER_RUN_DIR"], "metrics.jsonl"), "w") as file:
    print(json.dumps({"schema": 1, "time": 1.8e9, "step": 3, "loss": 2.5, "total_steps": 10}), file=file)
raise ValueError("<boom> & @everyone")
"""


class Hook:
    """A service on loopback. `status`: what it answers; 0: it never does."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.status = 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append((self.path, dict(self.headers), body))
                if not hook.status:
                    time.sleep(60)
                self.send_response(hook.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    @property
    def at(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.socket.close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


def test_targets_are_read() -> None:
    assert parse_target("ntfy://alerts") == NotifyTarget("ntfy", "https://ntfy.sh/alerts")
    assert parse_target("ntfy://ntfy.example.org/alerts") == NotifyTarget("ntfy", "https://ntfy.example.org/alerts")
    assert parse_target("https://ntfy.sh/alerts").kind == "ntfy"
    assert parse_target("https://hooks.slack.com/services/T/B/x").kind == "slack"
    assert parse_target("slack:https://chat.example.org/hooks/x") == NotifyTarget(
        "slack", "https://chat.example.org/hooks/x"
    )
    assert parse_target("https://discord.com/api/webhooks/1/x").kind == "discord"
    assert parse_target("mailto:me@example.org,you@example.org") == NotifyTarget(
        "mail", "me@example.org,you@example.org"
    )
    for command in ("mail -s done me", "curl -d @- https://example.org/x", "cat > told", "./tell.sh"):
        assert parse_target(command) == NotifyTarget("command", command)
    for wrong in (
        "ntfy://",
        "slack:",
        "slack:me",
        "discord:https://x",
        "mailto:",
        "mailto:-oQ/tmp",
        "mailto:a b",
        "teams://x",
        "http://x",
    ):
        with pytest.raises(Refusal) as refused:
            parse_target(wrong)
        assert refused.value.code == 64 and "\n" not in refused.value.line


def test_a_failed_run_is_one_readable_line(stoker: Stoker, hook: Hook) -> None:
    url = f"{hook.at}/topic-of-mine-77"
    done = stoker("run", "--name", "exp1", "--notify", url, stoker.script("b.py", BOOM))
    assert done.code == 1
    ((path, headers, body),) = hook.got
    line = body.decode()
    assert path == "/topic-of-mine-77" and headers["Priority"] == "high" and "\n" not in line
    assert re.match(
        r"exp1 failed; step 4/10; loss 2\.5; rank 0 .*ValueError: <boom> & @everyone.* \[rank\.exception\]; on ", line
    ), line
    assert line.endswith(f"stoker why {done.run_dir}"), line
    why = stoker("why", line.rpartition(" ")[2])
    assert why.code in (0, 1) and "boom" in why.out
    # The topic is the password: in no file and no line.
    assert "topic-of-mine" not in done.err
    for file in done.run_dir.rglob("*"):
        assert file.is_dir() or b"topic-of-mine" not in file.read_bytes(), file


def test_restarts_are_told_too_and_the_end(stoker: Stoker, hook: Hook) -> None:
    script = stoker.script(
        "k.py",
        "import os, signal, stoker\nstoker.beat(step=1)\nif not os.path.exists('again'):\n    open('again', 'w')\n    os.kill(os.getpid(), signal.SIGKILL)",
    )
    done = stoker("run", "--name", "exp2", "--max-restarts", "2", "--notify", f"slack:{hook.at}/services/x", script)
    assert done.code == 0, done.err
    lines = sorted((json.loads(body)["text"] for _, _, body in hook.got), key=len)
    assert len(lines) == 2 and lines[0].startswith("exp2 completed; step ") and "exp2 is restarting; " in lines[1]


def test_slack_and_discord_get_text_and_nothing_else(hook: Hook) -> None:
    verdict = Verdict("failed", "rank.exception", "<!channel> & @everyone " + "x" * 5000, 1, run="r")
    for kind in ("slack", "discord"):
        notifier = Notifier(f"{kind}:{hook.at}/hooks/secret", pytest.fail)
        notifier.send(verdict, "ended", "")
        notifier.close()
    slack, discord = (json.loads(body) for _, _, body in hook.got)
    assert "&lt;!channel&gt; &amp; @everyone" in slack["text"] and slack.keys() == {"text"}
    assert len(discord["content"]) <= 2000 and discord["allowed_mentions"] == {"parse": []}


def test_nothing_is_sent_when_the_user_stopped_it(stoker: Stoker, hook: Hook) -> None:
    script = stoker.script("w.py", "import time\nprint('up', flush=True)\ntime.sleep(60)")
    run = stoker.start("run", "--name", "exp3", "--notify", f"{hook.at}/topic", script)
    assert run.stdout is not None
    for line in iter(run.stdout.readline, b""):
        if b"up" in line:
            break
    assert stoker("stop", "exp3").code == 0
    run.communicate(timeout=60)
    assert run.returncode == 143 and hook.got == []


@pytest.mark.parametrize("status", [404, 302, 500])
def test_a_service_that_refuses_is_reported_and_changes_nothing(stoker: Stoker, hook: Hook, status: int) -> None:
    hook.status = status
    done = stoker("run", "--notify", f"{hook.at}/my-secret-topic", stoker.script("s.py", ""))
    assert done.code == 0 and done.verdict["status"] == "completed"
    port = hook.server.server_port
    assert f"stoker: --notify: ntfy at 127.0.0.1:{port} answered {status} " in done.err
    assert "my-secret-topic" not in done.err and [path for path, _, _ in hook.got] == ["/my-secret-topic"]


def test_a_service_that_never_answers_is_given_up(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.status = 0
    monkeypatch.setattr(notify, "NOTIFY_S", 1.5)
    told: list[str] = []
    notifier = Notifier(f"{hook.at}/topic", told.append)
    notifier.send(Verdict("failed", "rank.exception", "x", 1), "ended", "")
    notifier.close()
    assert told == ["stoker: --notify: ntfy did not respond within 2 s"]


def test_nobody_there_and_a_bad_target(stoker: Stoker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = stoker("run", "--notify", f"discord:http://127.0.0.1:{port}/x", stoker.script("s.py", ""))
    assert done.code == 0 and f"--notify: discord at 127.0.0.1:{port} can't be reached" in done.err
    refused = stoker("run", "--notify", "pigeon://roof", "s.py")
    assert refused.code == 64 and refused.err.count("\n") == 1 and "pigeon" in refused.err


def test_user_and_password_of_a_url_become_a_header(hook: Hook) -> None:
    notifier = Notifier(f"{hook.at.replace('http://', 'http://me:pa%20ss@')}/topic", pytest.fail)
    notifier.send(Verdict("completed", "completed", "done", 0, run="r"), "ended", "")
    notifier.close()
    ((path, headers, body),) = hook.got
    assert (path, headers["Authorization"]) == ("/topic", "Basic " + base64.b64encode(b"me:pa ss").decode())
    assert body.decode() == f"r completed; on {os.uname().nodename}"


def test_a_damaged_record_costs_step_and_loss_only(hook: Hook, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    notifier = Notifier(f"{hook.at}/topic", pytest.fail)
    notifier.send(Verdict("failed", "rank.exception", "two\nlines \x1b[31m", 1, run="r"), "ended", str(tmp_path))
    notifier.close()
    assert hook.got[0][2].decode().startswith("r failed; two\\nlines \\x1b[31m [rank.exception]; on ")


# ---- mail ----


def sendmail(folder: Path, body: str) -> dict[str, str]:
    program = folder / "bin" / "sendmail"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_mail_goes_through_sendmail(stoker: Stoker) -> None:
    env = sendmail(stoker.cwd, 'echo "$@" > words; cat > mail')
    done = stoker("run", "--name", "exp4", "--notify", "mailto:me@example.org", stoker.script("b.py", BOOM), env=env)
    assert done.code == 1 and "stoker: --notify" not in done.err
    assert (stoker.cwd / "words").read_text() == "-i me@example.org\n"
    head, _, text = (stoker.cwd / "mail").read_text().partition("\n\n")
    assert "To: me@example.org\n" in head and "Subject: stoker: exp4 failed [rank.exception]" in head
    assert "exp4 failed; step 4/10; loss 2.5" in text.replace("=\n", "") and "stoker why" in text.replace("=\n", "")


def test_a_sendmail_that_fails_is_reported(stoker: Stoker) -> None:
    env = sendmail(stoker.cwd, "echo mailbox full >&2; exit 75")
    done = stoker("run", "--notify", "mailto:me@example.org", stoker.script("s.py", ""), env=env)
    assert done.code == 0 and "--notify: mail: sendmail ended with 75: mailbox full" in done.err


class Smtp(socketserver.StreamRequestHandler):
    """As much SMTP as a message needs, without encryption."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        for line in iter(self.rfile.readline, b""):
            word = line[:4].upper()
            self.server.lines.append(line.decode().strip())  # type: ignore[attr-defined]
            if word == b"DATA":
                self.wfile.write(b"354 go\r\n")
                for text in iter(self.rfile.readline, b".\r\n"):
                    self.server.lines.append(text.decode().strip())  # type: ignore[attr-defined]
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


def test_mail_by_smtp_and_no_password_without_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Smtp) as mail:
        mail.lines = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=mail.serve_forever, args=(0.05,))
        thread.start()
        told: list[str] = []
        try:
            for user in ("", "me:hunter2hunter2@"):
                monkeypatch.setenv("STOKER_SMTP", f"smtp://{user}127.0.0.1:{mail.server_address[1]}")
                notifier = Notifier("mailto:you@example.org", told.append)
                notifier.send(Verdict("completed", "completed", "done", 0, run="r"), "ended", "")
                notifier.close()
        finally:
            mail.shutdown()
            thread.join()
        lines = "\n".join(mail.lines)  # type: ignore[attr-defined]
    assert "rcpt TO:<you@example.org>" in lines and f"r completed; on {os.uname().nodename}" in lines
    assert "hunter2" not in lines and told == [
        "stoker: --notify: mail: 127.0.0.1 offers no encryption: the password is not sent"
    ]


# ---- services that answer something else ----

ANSWERS = {
    "no HTTP": b"\x1b]0;owned\x07nonsense\r\n\r\n",
    "a redirect to a file": b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\n\r\n",
    "codes in its reason": b"HTTP/1.1 500 \x1b[31mx\r\n\r\n",
}


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/topic-nobody-knows"
        thread.join()


def sent_to(target: str, **changes: Any) -> list[str]:
    lines: list[str] = []
    notifier = Notifier(target, lines.append)
    about: dict[str, Any] = {"status": "failed", "cause": "rank.exit", "summary": "it failed", "exit_code": 1}
    notifier.send(Verdict(**{**about, **changes}), "ended", "")
    notifier.close()
    return lines


@pytest.mark.parametrize("what", ANSWERS)
def test_a_service_that_answers_nonsense_gets_one_clean_line(what: str) -> None:
    with answering(ANSWERS[what]) as url:
        lines = sent_to(url)
    assert len(lines) == 1 and lines[0].isprintable(), lines
    assert "Traceback" not in lines[0] and "client.py" not in lines[0] and "topic-nobody-knows" not in lines[0], lines
    assert "127.0.0.1" in lines[0]


def test_targets_that_cant_be_and_line_ends_in_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for impossible in ("http://127.0.0.1:abc/t", "http://[::1/t"):
        lines = sent_to(impossible)
        assert len(lines) == 1 and "Error" not in lines[0].replace("InvalidURL", ""), lines
    mail = tmp_path / "mail.txt"
    (tmp_path / "sendmail").write_text(f"#!/bin/sh\ncat > {mail}\n")
    (tmp_path / "sendmail").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("STOKER_SMTP", raising=False)
    assert not sent_to("mailto:me@example.org", cause="x\nBcc: all@example.org", summary="a\r\nBcc: b@example.org")
    assert not re.search(r"(?m)^Bcc", mail.read_text()) and "Subject: stoker: a run failed" in mail.read_text()


def test_a_message_about_a_restart_ends_while_the_run_goes_on() -> None:
    """Nobody waits for it before the run's end, and a service may send a byte now and then for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def answer() -> None:
            with server.accept()[0] as client, contextlib.suppress(OSError):
                while not over.wait(0.05):
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        verdict = Verdict("failed", "rank.exit", "it ended", 3, None).to_json()
        topic = {"kind": "ntfy", "to": f"http://127.0.0.1:{server.getsockname()[1]}/topic"}
        message = {"target": topic, "verdict": verdict, "what": "restarting", "run_dir": "", "seconds": 2.0}
        argv = module_command("stoker.control.show.notification", "entry")
        done = subprocess.run(argv, input=json.dumps(message), capture_output=True, text=True, timeout=60, check=False)
        over.set()
        thread.join()
    assert (done.returncode, done.stderr) == (1, "ntfy did not answer within 2 s\n")
