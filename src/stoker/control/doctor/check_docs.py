"""docs/doctor.md, made from the checks themselves:   python -m stoker.control.doctor.check_docs > docs/doctor.md"""

from __future__ import annotations

from stoker.control.doctor.check import load_checks

_HEAD = """# stoker doctor

Made from the code by `python -m stoker.control.doctor.check_docs`; a test keeps it current.

`stoker doctor` asks the driver, torch, the host and the network, each in a child of its own with a deadline, and says what is wrong, how it
knows, and what to type. Exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked. `--only gpu.` and `--skip host.disk`
choose by the beginning of an id. The checks marked *before a run* are made by `stoker run` too, on the GPUs it will use: a failure stops it
before anything starts (`--no-preflight` skips them).

| id | before a run | asks | what it looks at |
|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| `{one.id}` | {'yes' if one.fast else ''} | {', '.join(one.needs) or 'a look'} |"
        f" {' '.join(one.text.split())} |"
        for one in load_checks().values()
    ]
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
