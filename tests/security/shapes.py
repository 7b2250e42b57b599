"""Made-up secrets, as people carry them: text -> the part that must not be seen. Put together from pieces, so that no scanner takes this file for a leak."""

from __future__ import annotations

BODY = "Zx7Qp2Lm9Vt4Rw8K"
LONG = BODY + "s3Hd6Fj1Gn5Bc0Y" + "Ua7Ie2"
HEX = "0f3a9c" * 6 + "7b21"  # 40 digits
PEM = "".join(f"MIIEvQ{row}{BODY}{LONG}\n" for row in range(4))

SHAPES: dict[str, tuple[str, str]] = {
    "private key": ("-----BEGIN RSA " + "PRIVATE KEY-----\n" + PEM + "-----END RSA " + "PRIVATE KEY-----", BODY),
    "private key, cut": ("-----BEGIN " + "PRIVATE KEY-----\n" + PEM, BODY),
    "private key, escaped": ('{"private_key": "-----BEGIN ' + "PRIVATE KEY-----\\n" + PEM.replace("\n", "\\n") + "-----END " + 'PRIVATE KEY-----\\n"}', BODY),
    "azure account": ("DefaultEndpointsProtocol=https;AccountName=me;AccountKey=" + LONG + "==;EndpointSuffix=core.windows.net", LONG),
    "azure sas": ("https://me.blob.core.windows.net/c/x?sv=2023-01-03&se=2026-01-01&sr=b&sig=" + LONG + "%3D", LONG),
    "s3 signature": ("https://bucket.s3.amazonaws.com/x?X-Amz-Algorithm=A&X-Amz-Date=20260101T000000Z&X-Amz-Signature=" + HEX, HEX),
    "basic auth": ("Authorization: Basic " + "dXNlcjpodW50ZXIyaHVudGVy", "dXNlcjpodW50ZXIyaHVudGVy"),
    "basic auth, bare": ("sent Basic " + "dXNlcjpodW50ZXIyaHVudGVy", "dXNlcjpodW50ZXIyaHVudGVy"),
    "bearer": ("Authorization: Bearer " + BODY, BODY),
    "cookie": ("Cookie: id=" + BODY + "; theme=dark", BODY),
    "curl -u": ("curl -s -u me:" + BODY + " https://example.org", BODY),
    "curl -uNAME": ("curl -ume:" + BODY + " https://example.org", BODY),
    "sshpass": ("sshpass -p " + BODY + " ssh node1", BODY),
    "mysql": ("mysql -h db -p" + BODY + " runs", BODY),
    "redis-cli": ("redis-cli -a " + BODY + " ping", BODY),
    "telegram": ("curl https://api.telegram.org/bot" + "123456789:AA" + LONG[:33] + "/sendMessage", LONG[:33]),
    "slack": ("https://hooks.slack.com/" + "services/T0123/B0456/" + BODY, BODY),
    "discord": ("https://discord.com/api/" + "webhooks/1234567890/" + LONG, LONG),
    "teams": ("https://me.webhook.office.com/webhookb2/" + BODY + "@x/IncomingWebhook/" + LONG, LONG),
    "token as user": ("https://" + LONG + "@github.com/me/repo", LONG),
    "token as password": ("git+https://oauth2:" + BODY + "@gitlab.com/me/repo", BODY),
    "password in a url": ("postgres://me:" + BODY + "@db:5432/x", BODY),
    "password with a slash": ("redis://:p/" + BODY + "@cache:6379/0", BODY),
    "proxy": ("me:" + BODY + "@proxy.example.org:3128", BODY),
    "google": ("AI" + "za" + LONG, LONG),
    "stripe": ("sk_" + "live_" + LONG, LONG),
    "openai": ("sk-" + "proj-" + LONG, LONG),
    "hugging face": ("hf_" + "Qwertzuiopasdfghjklyxcvbnm", "Qwertzuiopasdfghjklyxcvbnm"),
    "github": ("ghp_" + LONG, LONG),
    "github, fine": ("github_" + "pat_" + LONG, LONG),
    "gitlab": ("gl" + "pat-" + LONG, LONG),
    "aws id": ("AKIA" + "QWERTZUIOPAS2345", "QWERTZUIOPAS2345"),
    "slack token": ("xox" + "b-" + LONG, LONG),
    "jwt": ("ey" + "J" + BODY + ".ey" + "J" + BODY + "." + LONG, LONG),
    "npmrc": ("//registry.npmjs.org/:_auth" + "Token=" + BODY, BODY),
    "pypi": ("py" + "pi-AgEIcHlwaS5vcmc" + LONG, LONG),
    "netrc": ("machine api.wandb.ai\n  login user\n  password " + HEX, HEX),
    "netrc, one line": ("machine api.wandb.ai login user password " + HEX, HEX),
    "api_key=": ("Client(host='x', api_key=" + BODY + ")", BODY),
    "json key": ('{"key":"' + BODY + '"}', BODY),
    "json in json": ('{"body": "{\\"api_key\\": \\"' + BODY + '\\"}"}', BODY),
    "yaml": ("user: me\npassword: correct horse " + BODY + "\n", BODY),
    "ini": ("[default]\naws_secret_access_" + "key = " + LONG, LONG),
    "xml": ("<server><password>" + BODY + "</password></server>", BODY),
    "flag": ("deploy --password " + BODY + " now", BODY),
    "flag in quotes": ("deploy --password 'two " + BODY + "' now", BODY),
    "python": ("os.environ['OPENAI_API_KEY'] = '" + BODY + "'", BODY),
    "bytes": ("connect(password=b'" + BODY + "')", BODY),
    "digits": ("login with PASSWORD=4711081547110815", "4711081547110815"),
    "digits, pin": ("card_pin: 90817263", "90817263"),
}

# Names under which any value is a secret, for the environment and for flags.
NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MY_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "SSHPASS", "DB_PASS", "GH_PAT",
    "CLIENT_SECRET", "PRIVATE_KEY", "apiKey", "SLACK_WEBHOOK_URL", "REDISCLI_AUTH", "SESSION_TOKEN", "API_TOKEN_PROD", "API_KEY_2", "AZURE_STORAGE_CONNECTION_STRING",
    "SENTRY_DSN", "GOOGLE_APPLICATION_CREDENTIALS_RAW", "OTP", "USER_PIN", "ACCESS_TOKENS", "ROOT_PW",
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
