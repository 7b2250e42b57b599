"""Secrets known by their shape: tokens, private keys, headers, URLs. Each detector gives the spans to hide; a new shape is one
more line.

Texts may be hostile and long. Each detector reads a text once: what follows a beginning is taken as a whole (so that no
position is tried twice) or has a bounded length, and no pattern can fail after an unbounded run and begin again within
it.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.secretnames import holds_any, word_set
from stoker.contract.secretvalues import opaque, plain
from stoker.contract.valuetext import LINE_END, Span, bare, compiled, quoted, value

_SHORTEST_TOKEN = 16
# What a text must hold for the pattern to be tried -> the pattern.
_TOKENS = {
    ("hf_", "api_org_"): r"(?:hf|api_org)_[A-Za-z0-9]{16,}",  # Hugging Face
    # OpenAI, Anthropic and others
    ("sk-", "xai-", "pplx-", "gsk_", "r8_", "nvapi-", "tskey-"): r"(?:sk-|xai-|pplx-|gsk_|r8_|nvapi-|tskey-)[\w-]{16,}",
    ("k_live_", "k_test_", "_org_live_", "_org_test_", "whsec_"): r"(?:[sr]k_(?:org_)?(?:live|test)|whsec)_[A-Za-z0-9]{10,}",  # Stripe
    ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"): r"(?:gh[pousr]|github_pat)_\w{16,}",
    ("glpat-", "glptt-", "gldt-", "glrt-", "glrtr-", "glcbt-", "glsoat-", "glagent-", "glft-", "glimt-", "glffct-", "glwt-", "gloas-", "GR1348941"):
        r"(?:gl(?:pat|ptt|dt|rtr?|cbt|soat|agent|ft|imt|ffct|wt|oas)-|GR1348941)[\w-]{16,}(?:\.[0-9a-z]{2}\.[0-9a-z]{9})?",
    ("AKIA", "ASIA", "ABIA", "ACCA"): r"A(?:KI|SI|BI|CC)A[A-Z0-9]{12,}",  # AWS
    # AWS: Bedrock's keys, and tokens of a session
    ("ABSK", "bedrock-api-key-", "IQoJb3JpZ2lu", "FwoGZXIvYXdz"): r"(?:ABSK|bedrock-api-key-|IQoJb3JpZ2lu|FwoGZXIvYXdz)[A-Za-z0-9+/]{60,}={0,2}",
    ("AIza", "ya29.", "GOCSPX-", "AQ.Ab"): r"(?:AIza|ya29\.(?:[a-z]\.)?|GOCSPX-|AQ\.Ab)[\w-]{16,}",  # Google
    ("1//0",): r"1//0[\w-]{40,}",  # Google, to refresh
    ("xox", "xapp-"): r"xoxd-(?:[\w+/=-]|%2[BbFf]|%3[Dd]){10,}|(?:xox[abceoprs]|xapp)-[\w-]{10,}",  # Slack
    ("eyJ",): r"eyJ[\w-]*(?:\.[\w-]*)*",  # JWT
    ("npm_",): r"npm_[A-Za-z0-9]{30,}",
    ("pypi-", "rubygems_", "dckr_pat_", "_v1_", "shpat_", "shpss_", "shpca_", "lin_api_", "sbp_"):
        r"(?:pypi-|rubygems_|dckr_pat_|(?:do[oprt]|wandb)_v1_|shp(?:at|ss|ca)_|lin_api_|sbp_)[\w-]{16,}",
    ("SG.", "hvs.", "hvb.", "hvr."): r"(?:SG|hv[sbr])\.[\w-]{16,}(?:\.[\w-]+)?",  # SendGrid, Vault
    ("dapi", "key-"): r"(?:dapi|key-)[0-9a-f]{32}",  # Databricks, Mailgun
    ("rpa_", "KGAT_", "pcsk_", "lsv2_", "tgp_v1_", "ntn_", "figd_", "nfp_", "pscale_tkn_", "dckr_oat_", "glsa_", "glc_"):
        r"(?:rpa|KGAT|pcsk|lsv2|tgp_v1|ntn|figd|nfp|pscale_tkn|dckr_oat|glsa|glc)_[\w-]{24,}",  # RunPod, Kaggle, Pinecone …
    ("PMAK-", "NRAK-", "HRKU-", "ATATT3", "ATBB", "sq0"): r"(?:PMAK-|NRAK-|HRKU-|ATATT3|ATBB|sq0(?:csp|atp)-)[\w-]{20,}",
    # Cerebras, Tavily, Thinking Machines, Supabase, Sentry, 1Password, Doppler, Terraform, Artifactory, Dropbox, Mapbox
    ("csk-", "tvly-", "tml-", "sb_secret_"): r"(?:csk-|tvly-|tml-|sb_secret_)(?=[\w-]{0,80}\d)[\w-]{24,}",
    ("sntrys_", "sntryu_", "ops_ey", "lin_oauth_", "pscale_pw_"): r"(?:sntry[su]_|ops_ey|lin_oauth_|pscale_pw_)[\w+/=-]{24,}",
    ("dp.", "sk.ey", "dt0c01.", "snyk_uat.", "sl.u.", "sl.B"): r"(?:dp\.(?:st|pt|ct|sa)\.(?:[a-z0-9_-]{1,35}\.)?|sk\.ey|dt0c01\.|snyk_uat\.)[\w.-]{30,}|sl\.(?:u\.|B)[\w-]{60,}",
    (".atlasv1.", "AKCp"): r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}|AKCp[A-Za-z0-9]{60,}",
    # ElevenLabs, E2B, Prime Intellect, Pulumi, Firecrawl, Jina, Fireworks, Anyscale, PostHog, Render, Vercel, Buildkite
    ("sk_", "e2b_", "pit_", "pul-", "fc-", "bkua_"): r"(?:sk_|e2b_|pit_|pul-|fc-|bkua_)[0-9a-f]{32,}",
    ("jina_", "aph0_", "phx_", "rnd_", "vcp_", "fw_", "fm2_"): r"(?:jina|aph0|phx|rnd|vcp|fw|fm2)_(?=[A-Za-z0-9]{0,80}\d)[A-Za-z0-9]{22,}",
    ("AGE-SECRET-KEY-",): r"AGE-SECRET-KEY-[A-Z0-9]{16,}",
    # Discord's bots
    tuple(first + second for first in "MNO" for second in "DTjz"): r"[MNO][DTjz][\w-]{22,26}\.[\w-]{6}\.[\w-]{27,40}",
    (":AA", "/bot"): r"(?:bot)?\d{6,12}:[\w-]{30,64}",  # Telegram's bots
}  # fmt: skip


def tokens(text: str) -> Iterator[Span]:
    if len(text) < _SHORTEST_TOKEN:
        return
    for marks, pattern in _TOKENS.items():
        if not holds_any(text, marks):
            continue
        for found in compiled(rf"(?<![A-Za-z0-9])(?:{pattern})").finditer(text):
            word = found[0]
            if word.startswith("eyJ") and word.count(".") < 2:  # JSON in base64, and not three parts of it
                continue
            if "sk-" in marks and not any(sign.isdigit() for sign in word[3:]):  # sk-learn-contrib-lightning
                continue
            yield found.start() + (3 if word.startswith("bot") else 0), found.end()


def private_keys(text: str) -> Iterator[Span]:
    """From the BEGIN line to the END line; where one of them was cut off, as far as the key's letters go."""
    if "PRIVATE KEY" not in text:
        return
    begun: int | None = None
    after = 0
    for found in compiled(r"-----(BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----").finditer(text):
        if found[1] == "BEGIN":
            if begun is not None:
                yield from _cut_key(text, begun, found.start())
            begun = found.start()
        else:
            if begun is None:
                yield from _pieces(text, max(after, found.start() - _AROUND), found.start())
                begun = _back(text, found.start(), after)
            yield begun, found.end()
            begun, after = None, found.end()
    if begun is not None:
        yield from _cut_key(text, begun, len(text))


_BEFORE_LINE = 60  # characters that logs put before each line: [rank0], a time, >
_AROUND = 1 << 16  # characters among which the lines of a cut key may lie: several ranks print between them


def _cut_key(text: str, begun: int, limit: int) -> Iterator[Span]:
    end = _cut_body(text, begun, limit)
    yield begun, end
    yield from _pieces(text, end, min(limit, end + _AROUND))


def _pieces(text: str, begin: int, end: int) -> Iterator[Span]:
    """Of a key whose other end is cut off: words of base64, whatever stands between them."""
    for found in compiled(r"[A-Za-z0-9+/=]{16,}").finditer(text, begin, end):
        word = found[0]
        path = word[0] == "/" and len(word) < 40
        if not path and not (word.islower() or word.isupper()) and compiled(r"[A-Za-z]\d|\d[A-Za-z]").search(word):
            yield found.span()


def _cut_body(text: str, begun: int, limit: int) -> int:
    """The end of the base64 lines (and headers) behind a BEGIN line. `limit`: where the next key begins."""
    gap = r"""(?:\\{1,8}[nrt]|[\s"',])"""
    begins = rf"(?:\\{{1,8}}r|\r)?(?:\\{{1,8}}n|\n)[^\r\n\\]{{1,{_BEFORE_LINE}}}?[ >|\]:]"
    line = rf"""(?:{gap}*[A-Za-z0-9+/=]{{16,}}|{begins}[A-Za-z0-9+/=]{{16,100}}(?=[\s"',)\\<]|$))"""
    body = (
        rf"-----[A-Z0-9 ]+-----(?:{gap}+[A-Za-z-]{{1,40}}:"
        rf" [^\r\n\\]{{0,200}})*{line}*(?:{gap}*[A-Za-z0-9+/]{{1,15}}=+)?"
    )
    found = compiled(body).match(text, begun, limit)
    return found.end() if found else limit


def _back(text: str, at: int, limit: int) -> int:
    """The beginning of the lines of base64 that end here; something may stand before each."""
    while at > limit and (text[at - 1].isalnum() or text[at - 1] in "+/=\r\n\\ \t"):
        at -= 1
    begin = text.rfind("\n", limit, at) + 1 or limit
    while begin > limit and at - begin <= 200:  # lines that end in base64, whatever they begin with
        before = text.rfind("\n", limit, begin - 1) + 1 or limit
        if not compiled(rf"[^\r\n]{{0,{_BEFORE_LINE}}}?[A-Za-z0-9+/=]{{16,100}}\s*").fullmatch(text, before, begin):
            break
        at = begin = before
    return at


_HEADER = r"""(?i)(?:authorization|cookie)\\{0,8}["'`]?\s{0,3}[:=]\s{0,3}"""
_SCHEME = r"(?i)(?:(bearer|basic|token|apikey)|digest|negotiate|oauth|sharedkey|aws4-hmac-sha256)\s{1,3}"


def headers(text: str) -> Iterator[Span]:
    """Authorization: SCHEME VALUE, Cookie: VALUE; and a scheme with its value alone."""
    small = text.lower()
    if not holds_any(small, ("authorization", "cookie", "bearer", "basic")):
        return
    if "authorization" in small or "cookie" in small:
        done = 0
        for found in compiled(_HEADER).finditer(text):
            if found.start() < done:
                continue
            whole = quoted(text, found.end(), len(text))
            begin = whole.begin if whole else found.end()
            scheme = compiled(_SCHEME).match(text, begin, whole.end if whole else len(text))
            begin = scheme.end() if scheme else begin
            if scheme and scheme[1] and not whole:  # one word, and a sentence may go on
                whole = value(text, begin, len(text))
            last = whole or bare(text, begin, len(text), LINE_END)
            begin, end, done = max(begin, last.begin), last.end, last.after
            if not plain(text[begin:end].strip()):
                yield begin, end
    if "bearer" in small or "basic" in small:
        for found in compiled(r"(?i)\b(bearer|basic)\s{1,3}([\w.~+/=:%\-]{8,})").finditer(text):
            if opaque(found[2]) if found[1].lower() == "bearer" else _is_user_and_password(found[2]):
                yield found.span(2)


def _is_user_and_password(word: str) -> bool:
    """HTTP's Basic: base64 of user:password."""
    import binascii

    word = word[:400].rstrip("=")
    try:
        decoded = binascii.a2b_base64(word + "=" * (-len(word) % 4)).decode()
    except ValueError:
        return False
    return ":" in decoded and decoded.isprintable()


_HOOK_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "outlook.office.com", "outlook.office365.com", "hooks.zapier.com",
               "make.com", "maker.ifttt.com", "feishu.cn", "larksuite.com")  # fmt: skip
_HOOKS = word_set("services workflows triggers webhook webhooks webhookb2 hook hooks catch key incomingwebhook")


def urls(text: str) -> Iterator[Span]:
    """scheme://user:PASSWORD@host, https://TOKEN@host, and paths that let anybody post: hooks.slack.com/services/..."""
    at = text.find("://")
    while at >= 0:
        begin = at + 3
        end = compiled(r"""[^\s/?#"'`<>\\]*""").match(text, begin).end()  # type: ignore[union-attr]
        user, sign, host = text[begin:end].rpartition("@")
        if sign:
            yield from _user(text[max(0, at - 12) : at], user, begin)
        else:
            yield from _password_with_slash(text, begin, end)
        yield from _hook(text, host.partition(":")[0].lower(), end)
        yield from _topic(text, at, end, host.partition(":")[0].lower())
        at = text.find("://", begin)
    if "/services/T" in text or "/webhooks/" in text:  # without its host, as in messages of requests
        for found in compiled(
            r"/services/T\w{6,40}/B\w{6,40}/(\w{16,100})|/webhooks/\d{6,30}/([\w-]{16,200})"
        ).finditer(text):
            yield found.span(1) if found[1] else found.span(2)
    if "@" in text:  # a proxy without a scheme: user:PASSWORD@host:3128
        proxy = compiled(r"""(?<![\w/.:\-])[\w.\-]{1,64}:([^\s:/@"'`<>]{6,200})@[\w.\-]{1,253}:\d{2,5}\b""")
        for found in proxy.finditer(text):
            if opaque(found[1]):
                yield found.span(1)


def _user(before: str, user: str, begin: int) -> Iterator[Span]:
    name, colon, password = user.partition(":")
    if colon and not plain(password):
        yield begin + len(name) + 1, begin + len(user)
    web = before.lower().endswith(("http", "https", "ftp", "ws", "wss"))
    if (len(name) >= 16 or opaque(name)) and (web or colon) and not plain(name):
        yield begin, begin + len(name)


def _password_with_slash(text: str, begin: int, end: int) -> Iterator[Span]:
    """redis://:pa/ss@host, or another sign that ends a host: what follows the colon is no port."""
    name, colon, rest = text[begin:end].partition(":")
    if not colon or rest.isdigit() or not rest or text[end : end + 1] not in ("/", "?", "#"):
        return
    found = compiled(r"""[^\s"'`<>@\\]{0,200}@""").match(text, end)
    if found:
        yield begin + len(name) + 1, found.end() - 1


def _topic(text: str, at: int, end: int, host: str) -> Iterator[Span]:
    """ntfy://TOPIC, ntfy://host/TOPIC and https://ntfy.sh/TOPIC: who knows the topic can read and write it."""
    own = text[max(0, at - 12) : at].lower().endswith("ntfy")
    begin = end + 1
    if own and text[end : end + 1] != "/":
        begin = at + 3
    elif not own and host != "ntfy.sh" and not host.startswith("ntfy."):
        return
    found = compiled(r"""[^\s"'`<>\\,;)]{0,500}""").match(text, begin)
    topic = found[0] if found else ""
    if not plain(topic) and not topic.isupper():  # in capitals: documentation's
        yield begin, begin + len(topic)


def _hook(text: str, host: str, at: int) -> Iterator[Span]:
    path = compiled(r"""/[^\s?#"'`<>\\,;:)]{0,500}""").match(text, at)
    if path is None:
        return
    known = host.endswith(_HOOK_HOSTS)
    armed = False
    place = at
    for segment in path[0].split("/")[1:]:
        place += 1
        if armed and known:
            if not plain(segment):
                yield place, path.end()
            return
        if armed and opaque(segment) and not plain(segment):
            yield place, place + len(segment)
        armed = armed or segment.lower() in _HOOKS
        place += len(segment)
