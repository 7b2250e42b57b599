"""Hosts that can't be used: all of them in one line, each with its reason."""

from __future__ import annotations

from stoker.contract.names import EX_UNAVAILABLE, Refusal


class Unusable(Refusal):
    """Hosts that do not answer, all of them: name -> why."""

    def __init__(self, hosts: dict[str, str], total: int, code: int = EX_UNAVAILABLE) -> None:
        self.hosts = {name: why.replace(f"is gone: host {name}: ", "is gone: ", 1) for name, why in hosts.items()}
        (first, why), *more = self.hosts.items()
        if total == 1:
            line = f"the agent on {f'host {first}' if first else 'this machine'} {why}"
        else:
            said = "; ".join(f"{name}: {short(told)}" for name, told in self.hosts.items())
            line = (
                f"{len(hosts)} of {total} hosts can't be used: {said}"
                if more
                else f"host {first} can't be used: {short(why)}"
            )
        super().__init__(line, code, cause="host.agent" if total == 1 else "launch.hosts")


def short(why: str) -> str:
    """Why a host can't be used, after its name: ssh's own last words."""
    return why.removeprefix("is gone: ").removeprefix("it ended: ")
