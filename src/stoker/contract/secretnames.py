"""Which names stand for a secret: by a name's words (api_key, apiKey, API-KEY are api + key), never by parts of one.

So max_tokens, monkey, author, num_key_value_heads and TOKENIZERS_PARALLELISM are no secrets. No regular expressions:
every launch reads each variable's name, and compiling one costs more than all of them.
"""

from __future__ import annotations

from itertools import pairwise

NO, MAYBE, SURE = 0, 1, 2  # MAYBE: as often something else (key, signature, session): the value decides

# A name without one of these is not looked at closer.
SEEDS = (
    "key", "token", "secret", "pass", "pwd", "cred", "auth", "cookie", "sess", "sig", "dsn", "webhook", "pin", "pat", "pw", "otp", "jwt", "bearer",
    "mnemonic", "connection", "conn_str", "connstr", "mfa", "2fa",
)  # fmt: skip


def word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ANYWHERE = word_set(
    "password passwords passwd passphrase passcode pwd secret secrets credential credentials creds cred authorization"
    " cookie cookies jwt otp totp bearer webhook webhooks dsn mnemonic passkey sshpass connstr"
)
# Words written as one: PGPASSWORD, authToken in lower case.
_ENDS = (
    "password", "passwd", "passphrase", "passcode", "secret", "apikey", "apitoken", "authtoken", "accesstoken", "refreshtoken", "accesskey", "secretkey",
    "privatekey", "accountkey", "identitytoken", "registrytoken", "sessionkey", "sessiontoken", "sessionid", "sessid", "credential", "credentials",
    "rootpw", "adminpw", "userpw", "dbpw", "bindpw", "dbpass", "pgpass", "userpass", "rootpass", "adminpass", "ftppass", "keypass", "storepass",
    "authkey", "masterkey", "encryptionkey", "privkey", "hftoken", "ghtoken", "bottoken", "sastoken",
)  # fmt: skip
_PAIRS = word_set(
    "api-key access-key secret-key private-key account-key signing-key encryption-key auth-token access-token"
    " bearer-token refresh-token session-token session-key connection-string conn-str auth-header mfa-code fa-code"
    " client-key preshared-key"
)
# The last word counts, unless the word before it says that it is about something else.
_LAST = {
    "key": word_set(
        "answer any attention attn audio batch best cache caption chosen column completion config content data dataset date dict enter feature "
        "features field file foreign func function group hash head heads hot id image images index input instruction invalid json kv label labels layer "
        "lookup map mask message messages metric missing model module monitor n name num object order output param partition path per press primary prompt "
        "pub public query question rank rejected reserved response reward role routing row sample score seed shard shift sort source src stage state step "
        "target text time tokenizer unexpected unit unknown value video worst wrong"
    ),
    "token": word_set(
        "added assistant audio bad begin blank boi bos chat class cls current decoder distill each encoder end eoi eom eos eot every expired extra fim "
        "first forced generated image img input invalid last mask max middle min missing n new newline next null num object of one out output pad padding "
        "per pointer prefix prev previous prompt query register response role sentinel sep single space speaker special speech start stop sub suffix "
        "system target text think thinking time tool tools turn unexpected unk unknown video vocab word"
    ),
    "pass": word_set(
        "all backward band by compile data each eval every fast first forward full high last low max multi n next num one optimizer per second single slow "
        "train two warmup"
    ),
    "auth": word_set("disable enable no require skip use"),
    "pin": word_set("core cpu gpio memory no numa thread"),
    "pw": frozenset(),
    "pat": frozenset(),
}  # fmt: skip
_BARE_MAYBE = frozenset(("key", "pass", "pat"))
_MAYBE_LAST = frozenset(("signature", "sig", "session"))
# api_keys and access_tokens hold secrets; sort_keys and max_tokens do not.
_PLURAL = {"keys": "key", "tokens": "token"}
_OF_SECRETS = word_set("access api auth bearer encryption private refresh secret session signing")
# Behind the word that counts, without a meaning of their own: API_KEY_PROD, TOKEN2.
_TRAILING = word_set("b backup base current dev env hex main old pem plain prod raw secondary staging test v value var")
# Last words of names that are about a secret and do not hold it.
_ABOUT = word_set(
    "age alg algo algorithm attempts backend check class count dim dir disabled domain enabled endpoint errors error"
    " exception expiration expires expiry failed field fields file files folder format helper host hosts index kind len"
    " length limit manager method missing mode name names parallelism path paths policy port process prompt provider ref"
    " refs required rotation size sock socket source store strategy timeout ttl type types uri url version"
)
_FILES = word_set(
    "c cc cfg com conf cpp crt dev example go h html ini internal io js json local log md net org pem py rs sh toml ts"
    " txt yaml yml"
)
_ERRORS = word_set("bad expired incorrect invalid missing wrong")
# Variables of shells and desktops.
_HARMLESS = word_set(
    "PWD OLDPWD DESKTOP_SESSION XDG_SESSION_ID XDG_SESSION_TYPE XDG_SESSION_CLASS SESSION_MANAGER GDMSESSION"
)
_LONGEST = 128  # of a name: its end counts

_rated: dict[str, int] = {}


def holds_any(text: str, marks: tuple[str, ...]) -> bool:
    for mark in marks:  # noqa: SIM110  any() with a generator takes four times as long
        if mark in text:
            return True
    return False


def rate(name: str) -> int:
    """NO, MAYBE or SURE."""
    name = name[-_LONGEST:]
    known = _rated.get(name)
    if known is None:
        known = _rate(name)
        if len(_rated) > 2048:  # names in hostile text never end
            _rated.clear()
        _rated[name] = known
    return known


def words_of(name: str) -> list[str]:
    """In lower case: AWSAccessKeyId2 is aws, access, key, id, 2."""
    words: list[str] = []
    begun = 0
    for at, sign in enumerate(name):
        kind = _kind(sign)
        before = _kind(name[at - 1]) if at else 0
        after = _kind(name[at + 1]) if at + 1 < len(name) else 0
        if (
            kind == 0
            or (before and kind != before and not (before == 2 and kind == 1))
            or (before == 2 and kind == 2 and after == 1)
        ):
            if name[begun:at]:
                words.append(name[begun:at].lower())
            begun = at + (kind == 0)
    return [*words, name[begun:].lower()] if name[begun:] else words


def _kind(sign: str) -> int:
    """0 between words, 1 lower case, 2 upper case, 3 a digit."""
    if sign.isalpha():
        return 2 if sign.isupper() else 1
    return 3 if sign.isdigit() else 0


def _rate(name: str) -> int:
    small = name.lower()
    if name in _HARMLESS or not holds_any(small, SEEDS):
        return NO
    words = words_of(name)
    if not words or words[0] in _ERRORS or ("." in name and words[-1] in _FILES):
        return NO
    if words[-1] in _ABOUT:
        return SURE if words[-2:] == ["webhook", "url"] else NO
    if any(word in _ANYWHERE or word.endswith(_ENDS) for word in words) or any(
        "-".join(pair) in _PAIRS for pair in pairwise(words)
    ):
        return SURE
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _TRAILING):
        words.pop()
    return _by_last(words)


def is_also_a_word(name: str) -> bool:
    """Sentences and programs have these without a secret: token, pin; input_ids_key. Not api_key."""
    words = words_of(name[-_LONGEST:])
    if len(words) == 1:
        return words[0] in _LAST
    return words[-1:] == ["key"] and "-".join(words[-2:]) not in _PAIRS


_OPEN = word_set(
    "account audience bucket client comment created desc description email id issuer label labels login namespace owner"
    " profile project region retries role scope scopes tenant title updated user username zone"
)


def is_public(name: str) -> bool:
    """Of an entry among secrets: who they belong to, how they are kept."""
    words = words_of(name[-_LONGEST:])
    return bool(words) and (words[-1] in _ABOUT or words[-1] in _OPEN)


def is_phrase(name: str) -> bool:
    """People write these with spaces."""
    return words_of(name[-_LONGEST:])[-1].endswith(("password", "passphrase", "passwd", "secret", "mnemonic"))


def _by_last(words: list[str]) -> int:
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _PLURAL:
        return SURE if before in _OF_SECRETS else NO
    if last in _MAYBE_LAST or words[-2:] == ["session", "id"]:
        return MAYBE
    if last not in _LAST or before in _LAST[last]:
        return NO
    return MAYBE if not before and last in _BARE_MAYBE else SURE
