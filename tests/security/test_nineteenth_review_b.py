"""What the nineteenth review found: secrets below their names, a server's impossible numbers, frames behind the report of a NaN."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading

import pytest

from stoker.training.rl.server_match import Unanswered, served_logprobs


@pytest.mark.parametrize(
    "told", [10**400, -(10**400), True, float("nan"), float("inf"), "-1", None, [-1.0]], ids=lambda told: str(told)[:8]
)
def test_impossible_numbers_of_a_server_are_no_answer(told: object) -> None:
    """A number of 400 digits was an OverflowError in whoever asked."""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"logprobs": {"token_logprobs": [None, told]}}]}).encode())

        def log_message(self, *told: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(Unanswered, match="don't match the 2 tokens"):
            served_logprobs(f"127.0.0.1:{server.server_port}", "m", [1, 2])
        thread.join()


_ENDS = """
import sys
from stoker.training.forensics.culprit import NonFinite
from stoker.training.recipes import stage

def main(argv):
    raise NonFinite("step 0: NaN first in parameter norm.weight")

sys.exit(stage.run(main, []))
"""


def test_a_models_nan_ends_in_its_line_and_in_no_frames() -> None:
    """A folder whose weights hold one makes it at the first step."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and 'File "' not in done.stderr, done.stderr
    assert done.stderr.endswith("culprit.NonFinite: step 0: NaN first in parameter norm.weight\n")
