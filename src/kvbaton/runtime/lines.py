"""The prefill ranks we call: one line per address, and what we know of the process behind it.

Invariant: a line is forgotten when its process is gone, when it was fenced, or after a while without transfers; whoever
answers at the address later is a stranger until introduced. Next: destination.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbaton.errors import PeerLost
from kvbaton.protocol.messages import SideMessage, encode
from kvbaton.runtime.peers import IDLE_S
from kvbaton.runtime.sidechannel import Endpoint, SideChannel


@dataclass
class Line:
    used_s: float
    """When a transfer last began or ended over it, or was seen to be under way."""
    knows_us_as: str | None = None
    """The incarnation of ours that was introduced there."""
    greeted_us_as: str | None = None
    """The incarnation of ours that its transport has reached."""
    heard_s: float | None = None
    """Its last word."""


class Lines:
    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._lines: dict[Endpoint, Line] = {}

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._lines

    def find(self, endpoint: Endpoint) -> Line | None:
        return self._lines.get(endpoint)

    def use(self, endpoint: Endpoint, now_s: float) -> Line:
        """The line to `endpoint`, which now counts as used."""
        line = self._lines.setdefault(endpoint, Line(now_s))
        line.used_s = now_s
        return line

    def say(self, endpoint: Endpoint, message: SideMessage) -> str | None:
        """None, or why nobody can be called there; then the deadlines of whoever depends on it decide."""
        try:
            self._channel.send(endpoint, encode(message))
        except PeerLost as error:
            return str(error)
        return None

    def forget(self, endpoint: Endpoint) -> None:
        """Idempotent."""
        self._lines.pop(endpoint, None)
        self._channel.hang_up(endpoint)

    def forget_idle(self, in_use: Iterable[Endpoint], now_s: float) -> None:
        idle = {endpoint for endpoint, line in self._lines.items() if now_s >= line.used_s + IDLE_S}
        if not idle:
            return
        for endpoint in in_use:
            self.use(endpoint, now_s)
            idle.discard(endpoint)
        for endpoint in idle:
            self.forget(endpoint)
