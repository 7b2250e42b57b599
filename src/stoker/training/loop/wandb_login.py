"""Weights & Biases without importing it: its settings, and whether this user is logged in, checked before a run starts."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from stoker.contract.errors import EX_NOPERM, Refusal

WANDB_API = "https://api.wandb.ai"


def check_wandb_login(environment: Mapping[str, str]) -> None:
    """Refuse to log to wandb where wandb.init() would fail because nobody is logged in.

    Looks where wandb itself looks: WANDB_MODE, WANDB_API_KEY, the identity token's file, its settings files, and netrc.
    """
    settings = wandb_settings(environment)
    if environment.get("WANDB_MODE", settings.get("mode", "")) in ("offline", "disabled", "dryrun"):
        return
    if any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or settings.get("api_key"):
        return
    server = environment.get("WANDB_BASE_URL") or settings.get("base_url", WANDB_API)
    if not _netrc_machines(environment) & {urlsplit(server).netloc, urlsplit(WANDB_API).netloc}:
        host = "" if server == WANDB_API else f" --host {server}"
        line = f"train.log_to wandb: not logged in to {server}; type `wandb login{host}`, or set WANDB_MODE=offline"
        raise Refusal(f"{line} to keep the metrics on this machine", EX_NOPERM)


def wandb_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what wandb's settings files say: the user's, overridden by the one of the working directory."""
    user = environment.get("WANDB_CONFIG_DIR") or os.path.join(environment.get("HOME", "~"), ".config", "wandb")
    here = ".wandb" if os.path.exists(".wandb") else "wandb"
    settings: dict[str, str] = {}
    for folder in (os.path.expanduser(user), here):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(os.path.join(folder, "settings"))
        except (configparser.Error, UnicodeDecodeError):
            continue  # wandb ignores such a file, too
        settings |= dict(parser["default"]) if parser.has_section("default") else {}
    return settings


def _netrc_machines(environment: Mapping[str, str]) -> set[str]:
    """Return the machines with a password in the user's netrc; none if it can't be read, as wandb has it."""
    home = environment.get("HOME", "~")
    paths = [environment["NETRC"]] if environment.get("NETRC") else [f"{home}/.netrc", f"{home}/_netrc"]
    path = next((path for path in map(os.path.expanduser, paths) if os.path.exists(path)), None)
    if path is None:
        return set()
    try:
        hosts = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return set()
    return {machine for machine, (_, _, password) in hosts.items() if password}
