"""Made-up secrets, as people carry them: (text, the part that must not be seen). Put together from pieces, so that no scanner takes this file for a leak."""

from __future__ import annotations

import base64
import hashlib


def body_of(place: str) -> str:
    return "Zx7" + hashlib.sha256(place.encode()).hexdigest()[:10] + "qRw"


def shapes(place: str) -> dict[str, tuple[str, str]]:
    """Others for each place: what is known from one must not help to hide the other."""
    body = body_of(place)
    seed = hashlib.sha256(body.encode()).hexdigest()
    long, hex = body + "S3" + seed[:20] + "Y", seed[:40]
    digits, letters = str(int(seed, 16))[:16], "".join(chr(ord("a") + int(sign, 16)) for sign in seed[:26])
    basic = base64.b64encode(f"user:{body}".encode()).decode()
    pem = "".join(f"MIIEvQ{row}{body}{long}\n" for row in range(4))
    return {
        "private key": ("-----BEGIN RSA " + "PRIVATE KEY-----\n" + pem + "-----END RSA " + "PRIVATE KEY-----", body),
        "private key, cut": ("-----BEGIN " + "PRIVATE KEY-----\n" + pem, body),
        "private key, escaped": (
            '{"private_key": "-----BEGIN '
            + "PRIVATE KEY-----\\n"
            + pem.replace("\n", "\\n")
            + "-----END "
            + 'PRIVATE KEY-----\\n"}',
            body,
        ),
        "azure account": (
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=" + long + "==;EndpointSuffix=core.windows.net",
            long,
        ),
        "azure sas": (
            "https://me.blob.core.windows.net/c/x?sv=2023-01-03&se=2026-01-01&sr=b&sig=" + long + "%3D",
            long,
        ),
        "s3 signature": (
            "https://bucket.s3.amazonaws.com/x?X-Amz-Algorithm=A&X-Amz-Date=20260101T000000Z&X-Amz-Signature=" + hex,
            hex,
        ),
        "basic auth": ("Authorization: Basic " + basic, basic),
        "basic auth, bare": ("sent Basic " + basic, basic),
        "bearer": ("Authorization: Bearer " + body, body),
        "cookie": ("Cookie: id=" + body + "; theme=dark", body),
        "curl -u": ("curl -s -u me:" + body + " https://example.org", body),
        "curl -uNAME": ("curl -ume:" + body + " https://example.org", body),
        "sshpass": ("sshpass -p " + body + " ssh node1", body),
        "mysql": ("mysql -h db -p" + body + " runs", body),
        "redis-cli": ("redis-cli -a " + body + " ping", body),
        "telegram": ("curl https://api.telegram.org/bot" + "123456789:AA" + long[:33] + "/sendMessage", long[:33]),
        "slack": ("https://hooks.slack.com/" + "services/T0123/B0456/" + body, body),
        "discord": ("https://discord.com/api/" + "webhooks/1234567890/" + long, long),
        "teams": ("https://me.webhook.office.com/webhookb2/" + body + "@x/IncomingWebhook/" + long, long),
        "token as user": ("https://" + long + "@github.com/me/repo", long),
        "token as password": ("git+https://oauth2:" + body + "@gitlab.com/me/repo", body),
        "password in a url": ("postgres://me:" + body + "@db:5432/x", body),
        "password with a slash": ("redis://:p/" + body + "@cache:6379/0", body),
        "proxy": ("me:" + body + "@proxy.example.org:3128", body),
        "google": ("AI" + "za" + long, long),
        "stripe": ("sk_" + "live_" + long, long),
        "openai": ("sk-" + "proj-" + long, long),
        "hugging face": ("hf_" + letters, letters),
        "github": ("ghp_" + long, long),
        "github, fine": ("github_" + "pat_" + long, long),
        "gitlab": ("gl" + "pat-" + long, long),
        "gitlab, scim": ("gl" + "soat-" + long, long),
        "aws id": ("AKIA" + letters.upper()[:16], letters.upper()[:16]),
        "slack token": ("xox" + "b-" + long, long),
        "jwt": ("ey" + "J" + body + ".ey" + "J" + body + "." + long, long),
        "npmrc": ("//registry.npmjs.org/:_auth" + "Token=" + body, body),
        "pypi": ("py" + "pi-AgEIcHlwaS5vcmc" + long, long),
        "netrc": ("machine api.wandb.ai\n  login user\n  password " + hex, hex),
        "netrc, one line": ("machine api.wandb.ai login user password " + hex, hex),
        "api_key=": ("Client(host='x', api_key=" + body + ")", body),
        "json key": ('{"key":"' + body + '"}', body),
        "json in json": ('{"body": "{\\"api_key\\": \\"' + body + '\\"}"}', body),
        "yaml": ("user: me\npassword: correct horse " + body + "\n", body),
        "ini": ("[default]\naws_secret_access_" + "key = " + long, long),
        "xml": ("<server><password>" + body + "</password></server>", body),
        "flag": ("deploy --password " + body + " now", body),
        "flag in quotes": ("deploy --password 'two " + body + "' now", body),
        "command that failed": (
            "Command '['curl', '-u', 'me:" + body + "', 'https://example.org']' returned non-zero exit status 22.",
            body,
        ),
        "flags that failed": ("Command '['deploy', '--password', '" + body + "']' timed out", body),
        "python": ("os.environ['OPENAI_API_KEY'] = '" + body + "'", body),
        "letters only": ("login(token='" + letters[:9] + "')", letters[:9]),
        "bytes": ("connect(password=b'" + body + "')", body),
        "digits": ("login with PASSWORD=" + digits, digits),
        "digits, pin": ("card_pin: " + digits[:8], digits[:8]),
    }


# Names under which any value is a secret, for the environment and for flags.
NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MY_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "SSHPASS", "DB_PASS", "GH_PAT",
    "CLIENT_SECRET", "PRIVATE_KEY", "apiKey", "SLACK_WEBHOOK_URL", "REDISCLI_AUTH", "SESSION_TOKEN", "API_TOKEN_PROD", "API_KEY_2", "AZURE_STORAGE_CONNECTION_STRING",
    "SENTRY_DSN", "GOOGLE_APPLICATION_CREDENTIALS_RAW", "OTP", "USER_PIN", "ACCESS_TOKENS", "ROOT_PW", "rootpw", "mfa_code",
)  # fmt: skip

# Stay as they are wherever they stand.
HARMLESS = (
    "max_tokens=512", "--num-tokens 1000", "seq_len=4096", "TOKENIZERS_PARALLELISM=false", "pad_token_id=0", "text_key=content", "eos_token=</s>",
    "tokenizer.path=models/gpt2", "--key-dim 64", "num_key_value_heads: 8", "monkey=1", "pass@1: 0.25", "passes=3", "author=Jane Roe", "keyboard=us",
    "sort_keys=True", "commit 39e22cd0f1a2b3c4d5e6f708192a3b4c5d6e7f80", "123e4567-e89b-12d3-a456-426614174000",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "sk-learn", "sk-learn-contrib-lightning", "hf_transfer",
    "HF_HUB_ENABLE_HF_TRANSFER=1", "https://host:8080/path", "user@host:path/to/file", "scp me@node1:/data/x .", "jane.roe@example.org",
    "KeyError: 'input_ids'", "Missing key(s) in state_dict: layers.0.weight", "docker run -u 1000:1000 image", "ssh://git@github.com/me/repo",
    "https://git@github.com/me/repo", "repo/image:tag@sha256:9f86d081884c7d659a2feaa0c55ad015", "bypass=1", "forward_pass=3", "pin_memory=True",
    "public_key=ssh-ed25519 AAAAC3", "tokens_per_second: 12345.6", "Bearer authentication required", "Basic understanding of it", "secrets.py:12: error",
    "auth.example.com:8080/x", "12:34:56 started", "std::auth::Token::new", "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4",
    "https://host/train.jsonl?split=train&revision=39e22cd0f1a2", "cache_key=deadbeef12345678", "GPU-5c7d2f1e-1111-2222-3333-444455556666",
    "TOKEN_FILE=/run/secrets/token", "the token is invalid", "stop_token=<|im_end|>", "primary_key=id", "password=$PASSWORD", "Authorization: Bearer $TOKEN",
    "checkpoint-key-frames.mp4", "train_tokens: 1000000", "special_tokens_map.json", "XDG_SESSION_ID=4", "signature: (int) -> str", "num_auth_retries=3",
)  # fmt: skip

# Sentences and lines of source code, as tracebacks and verdicts have them.
SENTENCES = (
    "a bent pin: reseat the card", "token = draw(logits, uniform, how)", "key = hashlib.sha256(text).hexdigest()[:32]", "Saver(rank=0, token=token, keep=2)",
    "if key == 'rope_theta' or token == self._token:", "FLOP/token = 6·N + 12·L", "after each token: what is written so far", "`--api-key`, `HF_TOKEN`",
    "def f(token: str, key: int) -> None:", "sorted(rows, key=lambda row: row.score)", "set --hf-token or HF_TOKEN", "argument --token: expected one argument",
    "password = getpass.getpass()", "client = Client(api_key=self.api_key)", 'secret = os.environ["X"]', "the secret is in the file",
)  # fmt: skip
