"""stoker cluster init HOST ...: write a hosts file by asking the hosts."""

from __future__ import annotations

import argparse
import os
import sys

from stoker.contract.settings import Parser

_EXAMPLES = """examples:
  stoker cluster init gpu1 gpu2 gpu3
  stoker cluster init train@192.168.1.100 train@192.168.1.101 --python '~/venv/bin/python' --workdir '~/train'
  stoker run --hosts cluster.yaml train.py"""


def parser() -> Parser:
    made = Parser(
        prog="stoker cluster init",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
        description=(
            "Asks each host for its GPUs, a Python with torch and its way to the others, and writes a hosts file."
        ),
    )
    made.add_argument(
        "hosts",
        nargs="+",
        metavar="HOST",
        help="name, address or ~/.ssh/config alias, in rank order; user@host is fine",
    )
    made.add_argument(
        "--out", default="cluster.yaml", metavar="FILE", help="the file to write (default: ./cluster.yaml)"
    )
    made.add_argument("--force", action="store_true", help="overwrite it")
    made.add_argument("--user", metavar="NAME", help="who to log in as")
    made.add_argument("--port", type=int, metavar="PORT", help="ssh's port")
    made.add_argument("--identity", metavar="FILE", help="a private key")
    made.add_argument(
        "--python",
        metavar="PATH",
        help="the Python of the ranks there (default: the first with torch of ~/venv, ~/.venv and python3)",
    )
    made.add_argument(
        "--workdir", metavar="DIR", help="the ranks' working directory there (default: that of `stoker run`)"
    )
    made.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    made.add_argument(
        "--ssh-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more word for ssh, e.g. --ssh-option=-p2222",
    )
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    from stoker.control.cluster.init import main_part
    from stoker.control.launch.members import Member, Members

    keys = ("user", "port", "identity", "python", "workdir")
    told.identity, told.ssh_config = _from_here(told.identity), _from_here(told.ssh_config)
    main_part(
        told.hosts,
        told.out,
        {key: getattr(told, key) for key in keys if getattr(told, key) is not None},
        {"ssh_config": told.ssh_config} if told.ssh_config else {},
        tuple(told.ssh_option),
        told.force,
        lambda links, hear, complain: Members([Member(link) for link in links], hear, complain),
        lambda line: print(f"stoker: {line}", file=sys.stderr, flush=True),
    )
    return 0


def _from_here(path: str | None) -> str | None:
    """A path in the file counts from the file; a flag's counts from here. A home stays a ~."""
    return os.path.abspath(path) if path and not path.startswith("~") else path
