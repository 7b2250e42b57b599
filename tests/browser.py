"""A real browser, by the W3C WebDriver protocol: as much of it as the tests of the page need."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"]  # fmt: skip

_NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"


class Browser:
    def __init__(self, port: int, folder: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options: dict[str, Any] = {"args": [*_FLAGS, f"--user-data-dir={folder}"]}
        asked = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})["sessionId"]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as problem:
            raise RuntimeError(json.load(problem)["value"]["message"]) from None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return self._call(method, f"/session/{self._session}{path}", body)

    def open(self, url: str) -> None:
        for _ in range(5):
            try:
                return self.ask("POST", "/url", {"url": url})
            except RuntimeError as problem:
                if _NETWORK_CHANGED not in str(problem):
                    raise
        raise AssertionError("network cards come and go without end")

    @property
    def url(self) -> str:
        return str(self.ask("GET", "/url"))

    def js(self, script: str, *args: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, css: str) -> str:
        return str(self.ask("POST", "/element", {"using": "css selector", "value": css})[ELEMENT])

    def text(self, css: str = "body") -> str:
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def click(self, css: str) -> None:
        self.ask("POST", f"/element/{self.find(css)}/click")

    def type(self, css: str, text: str) -> None:
        self.ask("POST", f"/element/{self.find(css)}/value", {"text": text})

    def drag(self, css: str, begin: float, end: float) -> None:
        """With the mouse, between two places across the element, as shares of its width."""
        box = self.js("const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.x, r.y, r.width, r.height]", css)  # fmt: skip
        y = int(box[1] + box[3] / 2)
        xs = [int(box[0] + box[2] * share) for share in (begin, (begin + end) / 2, end)]
        moves = [{"type": "pointerMove", "duration": 50, "x": x, "y": y} for x in xs]
        steps = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        self.ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": steps}]})

    def until(self, script: str, *args: Any, seconds: float = 30.0) -> Any:
        """What the script gives, once that is true."""
        deadline = time.monotonic() + 2 * seconds
        while True:
            found = self.js(f"return ({script})", *args)
            if found:
                return found
            assert time.monotonic() < deadline, f"never: {script}\n{self.text()[-3000:]}\n{self.log()}"
            time.sleep(0.1)

    def until_text(self, words: str, css: str = "body", seconds: float = 30.0) -> None:
        self.until("(document.querySelector(arguments[0])?.innerText ?? '').includes(arguments[1])", css, words, seconds=seconds)  # fmt: skip

    def log(self) -> list[str]:
        """What the console says since the last look: errors of scripts, refusals of the policy.

        Not that a request was given up because a network card came or went: other tests make network namespaces
        meanwhile, and the page asks again."""
        entries = self.ask("POST", "/se/log", {"type": "browser"})
        severe = [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
        return [message for message in severe if _NETWORK_CHANGED not in message]

    def size(self, width: int, height: int, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": scheme})

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))

    def close(self) -> None:
        self._call("DELETE", f"/session/{self._session}")


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Skips, with the reason, where there is no Chromium."""
    driver = shutil.which("chromedriver")
    if driver is None or not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no chromium with chromedriver here: apt-get install chromium chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen(
        [driver, f"--port={port}", "--allowed-ips=127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )
    browser: Browser | None = None
    try:
        deadline = time.monotonic() + 60
        while browser is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10):
                    browser = Browser(port, folder / "profile")
            except urllib.error.URLError:
                assert time.monotonic() < deadline and child.poll() is None, "chromedriver does not answer"
                time.sleep(0.05)
        yield browser
    finally:
        with contextlib.suppress(Exception):
            if browser is not None:
                browser.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait(30)
