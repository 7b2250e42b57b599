"""Generates docs/doctor.md from the checks: python -m stoker.control.doctor.check_docs > docs/doctor.md"""

from __future__ import annotations

from stoker.control.doctor.check import load_checks

_HEAD = """# stoker doctor

Generated from the code by `python -m stoker.control.doctor.check_docs`; a test keeps it current.

`stoker doctor` examines the driver, torch, the host and the network, each in a child process with a time limit. It reports what is wrong, the
evidence, and what to type. Exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked. `--only gpu.` and `--skip host.disk`
select checks by the beginning of their ids. `stoker run` also runs the checks marked *before a run*, on the GPUs it will use. A failure stops it before
anything starts (`--no-preflight` skips them).

| id | before a run | needs | what it does |
|---|---|---|---|
"""


def page() -> str:
    """Return docs/doctor.md."""
    rows = [
        f"| `{check.id}` | {'yes' if check.fast else ''} | {', '.join(check.needs) or 'machine'} |"
        f" {' '.join(check.text.split())} |"
        for check in load_checks().values()
    ]
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
