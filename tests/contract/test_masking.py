"""What contract/masking.py takes for a secret, and what it leaves readable."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from stoker.contract import masking
from stoker.contract.masking import (
    MASK,
    allowed_environment,
    is_secret_name,
    learn_secrets,
    mask_argv,
    mask_json,
    mask_lines,
    mask_text,
    mask_value,
)

BODY = "Zx7f00Lk9QwS3bV81mN4pR6tY2uC5hJ0dG9aE7iB"  # of no service
LETTERS = "abcdefghijklmnopqrstuvwxyzabcdefgh"
PEM = "-----BEGIN " + "PRIVATE KEY-----"

# Put together from pieces, so that no scanner takes this file for a leak. The secret part is BODY or LETTERS.
SHAPES = {
    "private key": f"{PEM}\n{BODY}\n{BODY}\n{PEM.replace('BEGIN', 'END')}",
    "private key without its end": f"{PEM}\n{BODY}\n{BODY}\n",
    "private key in JSON": json.dumps({"key": f"{PEM}\n{BODY}\n{PEM.replace('BEGIN', 'END')}\n"}),
    "hugging face": "hf_" + LETTERS,
    "openai": "sk-" + "proj-" + BODY,
    "nvidia": "nv" + "api-" + BODY,
    "groq": "gs" + "k_" + BODY,
    "replicate": "r" + "8_" + BODY,
    "wandb": "wandb_" + "v1_" + BODY,
    "runpod": "rp" + "a_" + BODY,
    "github": "gh" + "p_" + BODY,
    "github, fine-grained": "github_" + "pat_" + BODY + "_" + BODY,
    "gitlab": "gl" + "pat-" + BODY,
    "google": "AI" + "za" + BODY,
    "slack": "xox" + "b-" + BODY,
    "npm": "np" + "m_" + BODY,
    "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + BODY,
    "stripe": "sk_" + "live_" + BODY,
    "json web token": "ey" + "J" + BODY + ".ey" + "J" + BODY + "." + BODY,
    "slack's webhook": "https://hooks.slack.com/" + "services/T0123/B0456/" + BODY,
    "discord's webhook": "https://discord.com/api/" + "webhooks/1234567890/" + BODY,
    "telegram's bot": "https://api.telegram.org/" + "bot123456789:" + BODY + "/sendMessage",
    "ntfy": "ntfy://" + BODY,
    "ntfy.sh": "https://ntfy.sh/" + BODY,
    "password in a URL": f"postgres://me:{BODY}@db:5432/x",
    "escaped password in a URL": f"postgres://me:p%40{BODY}%2F@db:5432/x",
    "token as a user": f"https://{BODY}@github.com/me/repo",
    "signed URL": f"https://bucket.s3.amazonaws.com/x?X-Amz-Date=2026&X-Amz-Signature={BODY}",
    "Azure's signed URL": f"https://me.blob.core.windows.net/c/x?se=2026-01-01&sig={BODY}",
    "basic auth": f"Authorization: Basic {BODY}",
    "bearer": f"Authorization: Bearer {BODY}",
    "bearer alone": f"sent Bearer {BODY}",
    "headers of requests": f"{{'Authorization': 'Bearer {BODY}', 'Accept': '*/*'}}",
    "cookie": f"Cookie: id={BODY}; theme=dark",
    "variable": f"export DB_PASSWORD={BODY} && run",
    "argument in source code": f"Client(host='x', api_key='{BODY}')",
    "os.environ": f"os.environ['OPENAI_API_KEY'] = '{BODY}'",
    "JSON": json.dumps({"user": "me", "client_secret": BODY}),
    "JSON in JSON": json.dumps({"body": json.dumps({"api_key": BODY})}),
    "YAML": f"user: me\npassword: {BODY}\n",
    "INI": f"[default]\naws_secret_access_key = {BODY}",
    "npmrc": f"//registry.npmjs.org/:_authToken={BODY}",
    "flag": f"deploy --password {BODY} now",
    "flag in quotes": f"deploy --password 'two {BODY}' now",
    "command that failed": f"Command '['deploy', '--api-key', '{BODY}']' timed out",
    "connection string": f"AccountName=me;AccountKey={BODY}==;EndpointSuffix=core.windows.net",
    "token that looks machine-made": f"login(token='{BODY}')",
}  # fmt: skip
AROUND = (
    "{}",
    "ValueError: it said {} and ended",
    "first line\n{}\nlast line",
    "['a', '{}', 'b']",
    "a\\n{}\\n",
    "x%3D{}",
)

# Names under which any value is a secret, for variables, flags and keys.
NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MY_PASSWORD", "PGPASSWORD", "MYSQL_PWD",
    "SSHPASS", "DB_PASS", "GH_PAT", "CLIENT_SECRET", "PRIVATE_KEY", "apiKey", "SLACK_WEBHOOK_URL", "REDISCLI_AUTH",
    "SESSION_TOKEN", "API_TOKEN_PROD", "API_KEY_2", "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN", "ROOT_PW", "OPENAI_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS_RAW", "ACCESS_TOKENS", "MY_SERVICE_KEY", "hub_token", "wandb.api_key", "STOKER_API_KEY",
)  # fmt: skip
NO_SECRETS = (
    "max_tokens", "num_tokens", "tokenizer", "TOKENIZERS_PARALLELISM", "num_key_value_heads", "pad_token_id", "EOS_TOKEN",
    "author", "monkey", "sort_keys", "text_key", "cache_key", "PRIMARY_KEY", "keyboard", "passes", "bypass", "forward_pass",
    "TOKEN_FILE", "password_file", "token_count", "use_auth", "PWD", "OLDPWD", "public_key", "signature", "compass",
)  # fmt: skip
READABLE = (
    "max_tokens=512", "--num-tokens 1000", "TOKENIZERS_PARALLELISM=false", "pad_token_id=0", "text_key=content",
    "eos_token=</s>", "tokenizer.path=models/gpt2", "--key-dim 64", "num_key_value_heads: 8", "monkey=1", "pass@1: 0.25",
    "author=Jane Roe", "sort_keys=True", "commit 39e22cd0f1a2b3c4d5e6f708192a3b4c5d6e7f80", "sk-learn-contrib-lightning",
    "hf_transfer", "hf_hub_download_with_retries", "HF_HUB_ENABLE_HF_TRANSFER=1", "https://host:8080/path",
    "user@host:path/to/file", "jane.roe@example.org", "KeyError: 'input_ids'", "ssh://git@github.com/me/repo",
    "repo/image:tag@sha256:9f86d081884c7d659a2feaa0c55ad015", "pin_memory=True", "tokens_per_second: 12345.6",
    "Bearer authentication required", "secrets.py:12: error", "auth.example.com:8080/x", "std::auth::Token::new",
    "https://host/train.jsonl?split=train&revision=39e22cd0f1a2", "cache_key=deadbeef12345678",
    "GPU-5c7d2f1e-1111-2222-3333-444455556666", "TOKEN_FILE=/run/secrets/token", "the token is invalid",
    "stop_token=<|im_end|>", "password=$PASSWORD", "Authorization: Bearer $TOKEN", "special_tokens_map.json",
    "token = draw(logits, uniform, how)", "key = hashlib.sha256(text).hexdigest()[:32]", "client = Client(api_key=self.api_key)",
    "after each token: what is written so far", "def f(token: str, key: int) -> None:", "password = getpass.getpass()",
    'secret = os.environ["X"]', "the secret is in the file", "api_key: str = None", "export STOKER_API_KEY=$(openssl rand 24)",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_secrets", [])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_masked_in_text(shape: str, around: str) -> None:
    shown = mask_text(around.format(SHAPES[shape]))
    assert BODY not in shown and LETTERS not in shown and MASK in shown
    assert mask_text(shown) == shown, "text that is masked twice must not change"
    assert "last line" not in around or shape == "private key without its end" or "last line" in shown


@pytest.mark.parametrize("text", READABLE)
def test_text_without_secrets_stays_as_it_is(text: str) -> None:
    for around in ("{}", "first\n    {}\nlast"):
        assert mask_text(around.format(text)) == around.format(text)


def test_documentation_stays_readable() -> None:
    """`stoker docs` prints these pages."""
    for page in (Path(__file__).parents[2] / "docs").glob("*.md"):
        for line in page.read_text().splitlines():
            assert mask_text(line) == line, page.name


@pytest.mark.parametrize("name", NAMES)
def test_values_are_masked_under_secret_names(name: str) -> None:
    for value in ("hunter2", BODY, "two words", "/not/a/path"):
        assert is_secret_name(name) and mask_value(name, value) == MASK
        assert mask_argv([f"{name}={value}", "x"]) == [f"{name}={MASK}", "x"]
        assert mask_argv([f"--env={name}={value}"]) == [f"--env={name}={MASK}"]
        flag = f"--{name.lower() if name.isupper() else name}"
        if is_secret_name(flag):
            assert mask_argv([flag, value, "-v"]) == [flag, MASK, "-v"]
            assert mask_argv([f"{flag}={value}"]) == [f"{flag}={MASK}"]
        assert mask_json({name: value, "deep": [{name: [value]}]}) == {name: MASK, "deep": [{name: [MASK]}]}
        assert value not in mask_text(f'{{"{name}": "{value}"}}')


@pytest.mark.parametrize("name", NO_SECRETS)
def test_names_that_only_look_like_a_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_no_setting_of_ours_has_a_secrets_name() -> None:
    from stoker.contract.frozen import options_of
    from stoker.control.plan.options import RunOptions
    from stoker.training.config.keys import KEYS

    assert [name for name in (*KEYS, *options_of(RunOptions)) if is_secret_name(name)] == []


def test_switches_numbers_placeholders_and_files_are_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    readable = {
        "use_auth_token": True, "token": None, "password": "", "api_key": "none", "access_key": 5, "hf_token": "$HF_TOKEN",
        "wandb_api_key": "${KEY}", "private_key": str(tmp_path / "token"),
    }  # fmt: skip
    assert mask_json(readable) == readable
    assert mask_json({"password": 47110815}) == {"password": MASK}


def test_keys_and_command_lines_in_json() -> None:
    shown = mask_json({f"https://me:{BODY}@host/": 1, "argv": ["deploy", "--password", "correcthorse", "-v"], 5: "x"})
    assert shown == {f"https://me:{MASK}@host/": 1, "argv": ["deploy", "--password", MASK, "-v"], 5: "x"}
    for words in (["--use-auth-token", "-v", "x"], ["--token", "--fp16"], ["--password", "--max-length=5"]):
        assert mask_argv(words) == words
    assert mask_argv(["--max-tokens", "5", "--token", "s3cr3t"]) == ["--max-tokens", "5", "--token", MASK]


def test_given_values_are_masked_in_every_form() -> None:
    odd, quoted = "swordfish-of-no-shape", 'with "quotes" & spaces/и'
    learn_secrets(
        {
            "MY_PASSWORD": odd,
            "DB_PASS": quoted,
            "DATABASE_URL": "postgres://me:hunter2secret@db/x",
            "SHELL": "/bin/sh-long",
        },
        ["train.py", "--api-key", "only-on-the-command-line"],
    )
    forms = (odd, quoted, repr(quoted), json.dumps(quoted), quote(quoted), quote(quoted, safe=""), "hunter2secret")
    for form in (*forms, "only-on-the-command-line"):
        shown = mask_text(f"failed with {form} there")
        assert MASK in shown and not any(part in shown for part in ("swordfish", "quotes", "hunter2", "command")), shown
    assert mask_text("/bin/sh-long") == "/bin/sh-long"
    before = list(masking._secrets or ())
    learn_secrets({"MY_PASSWORD": odd, "DB_PASS": quoted})
    assert masking._secrets == before


def test_short_values_are_not_looked_for_in_text() -> None:
    learn_secrets({"COUNT_TOKEN": "1234567", "DB_PASSWORD": "abc", "TOKEN": "true"})
    assert mask_text("abc 1234567 true") == "abc 1234567 true"


def test_lines_are_masked_before_they_are_split() -> None:
    lines = mask_lines(f"bad key:\n\n{SHAPES['private key']}\nlast")
    assert lines == ["bad key:", MASK, "last"]


def test_the_record_has_variables_that_change_a_job_alone() -> None:
    variables = {
        "PATH": "/bin", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "HF_TOKEN": "hf_x", "HF_HOME": "/hf", "MY_PASSWORD": "x",
        "DATABASE_URL": "postgres://me:pw@db/x", "EDITOR": "vi", "STOKER_RDZV_SECRET": BODY, "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    assert allowed_environment(variables) == {
        "PATH": "/bin", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "HF_TOKEN": MASK, "HF_HOME": "/hf",
        "STOKER_RDZV_SECRET": MASK, "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip


def test_a_traceback_of_24_kb_is_masked_in_milliseconds() -> None:
    """Measured at 0.4 ms; the limit leaves room for a busy machine."""
    frame = '  File "/usr/lib/python3/transformers/trainer.py", line 100, in step\n    loss = f(pad_token_id=self.pad_token_id)\n'
    text = frame * (24_000 // len(frame)) + "RuntimeError: bad token hf_" + LETTERS
    seconds = []
    for _ in range(5):
        began = time.process_time()
        assert LETTERS not in mask_text(text)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.01


def test_importing_it_compiles_no_pattern() -> None:
    """Every launch imports it."""
    code = (
        "import re, stoker.contract.terminal\ncompile = re.compile\ncount = []\n"
        "re.compile = lambda *a, **k: (count.append(a), compile(*a, **k))[1]\nimport stoker.contract.masking\nprint(len(count))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@pytest.mark.parametrize(
    ("name", "value", "is_masked"), [("STOKER_API_KEY", "123456789", True), ("API_KEY", "12", False)]
)
def test_a_long_number_under_a_secrets_name_is_masked(name: str, value: str, is_masked: bool) -> None:
    assert (mask_value(name, value) == MASK) == is_masked
