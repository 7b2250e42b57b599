"""What the agent has children look at: ranks that may be stuck (inspection.py), and questions about this host
(probing.py). They may block; it goes on.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable

from stoker.contract import protocol
from stoker.control.agent.inspection import Inspection
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.agent.probing import Probe


class Looking:
    def __init__(self, selector: selectors.BaseSelector, relay: Relay, sweeper: Sweeper) -> None:
        self._selector = selector
        self._relay = relay
        self._sweeper = sweeper
        self._inspections: dict[int, Inspection] = {}
        self._probes: dict[int, Probe] = {}

    def inspect(self, order: protocol.Message, ranks: Iterable[Rank]) -> None:
        """Stacks and the flight recorder may take seconds, and a sick kernel may keep whoever asks. One at a time."""
        asked = [rank for rank in ranks if order.get("ranks") is None or rank.rank in order["ranks"]]
        if asked and not self._inspections:
            one = Inspection(order, asked)
            self._inspections[one.handle] = one
            self._sweeper.spare.add(one.pid)  # ends by itself, and is nothing the ranks left behind
            self._selector.register(one.handle, selectors.EVENT_READ, "look")
        else:
            self._relay.say({"is": "inspection", "ask": order["ask"]}, b"{}\n")

    def probe(self, order: protocol.Message) -> None:
        from stoker.control.agent.probing import Probe

        one = Probe(order)
        self._probes[one.handle] = one
        self._sweeper.spare.add(one.pid)
        self._selector.register(one.handle, selectors.EVENT_READ, "look")

    def tell(self, order: protocol.Message) -> None:
        """To a probe that runs: a word, or its end."""
        for one in self._probes.values():
            if one.ask == order["ask"]:
                one.tell(order["word"]) if order["do"] == "tell" else one.end()

    def read(self, handle: int) -> None:
        if handle in self._inspections:
            looked = self._inspections[handle]
            if looked.read():
                self._forget(handle, looked.pid)
                del self._inspections[handle]
                self._relay.say({"is": "inspection", "ask": looked.ask}, looked.answer())
            return
        one = self._probes[handle]
        for message, payload in one.read():
            if "more" not in message:
                self._forget(handle, one.pid)
                del self._probes[handle]
            self._relay.say(message, payload)

    def _forget(self, handle: int, pid: int) -> None:
        self._selector.unregister(handle)
        self._sweeper.spare.discard(pid)
