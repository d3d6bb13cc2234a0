"""A side channel without sockets: same words, no latency, and everything happens when the test says so.

`test_sidechannel.py` runs the same expectations over this and over the real one.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from kvbaton.errors import PeerLost
from kvbaton.runtime.sidechannel import MAX_RECEIVED, Caller, Endpoint, Received, SideChannel

HOST = "127.0.0.1"


@dataclass
class Network:
    """Who listens where, and which connections stand."""

    bound: dict[Endpoint, MemoryChannel] = field(default_factory=dict)
    callers: dict[Caller, tuple[MemoryChannel, Endpoint]] = field(default_factory=dict)
    ports: itertools.count[int] = field(default_factory=lambda: itertools.count(20000))
    names: itertools.count[int] = field(default_factory=itertools.count)
    num_sent: int = 0


@dataclass
class _Line:
    caller: Caller
    waiting: list[bytes] = field(default_factory=list)
    """Sent before anybody listened."""
    reached: MemoryChannel | None = None


class MemoryChannel(SideChannel):
    def __init__(self, network: Network, port: int = 0) -> None:
        self.port = port or next(network.ports)
        self._network = network
        self._mailbox: deque[Received] = deque()
        self._calls: dict[Endpoint, _Line] = {}
        self.refusals: dict[Endpoint, str] = {}
        self.suspicions: dict[Endpoint, str] = {}
        network.bound[Endpoint(HOST, self.port)] = self

    @property
    def has_mail(self) -> bool:
        return bool(self._mailbox)

    @property
    def num_lines(self) -> int:
        return len(self._calls)

    def wake(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def receive(self) -> list[Received]:
        for endpoint in self._calls:
            self._deliver(endpoint)
        news = [self._mailbox.popleft() for _ in range(min(len(self._mailbox), MAX_RECEIVED))]
        self.is_behind = len(news) == MAX_RECEIVED
        return news

    def lost(self) -> list[Endpoint]:
        broken = [
            endpoint
            for endpoint, line in self._calls.items()
            if line.reached is not None and self._network.bound.get(endpoint) is not line.reached
        ]
        for endpoint in broken:
            self.hang_up(endpoint)
        return broken

    def refused(self) -> list[tuple[Endpoint, str]]:
        return [(endpoint, self.refusals[endpoint]) for endpoint in self._calls if endpoint in self.refusals]

    def suspicion(self, endpoint: Endpoint) -> str | None:
        return self.suspicions.get(endpoint)

    def send(self, route: Caller | Endpoint, data: bytes) -> None:
        self._network.num_sent += 1
        if isinstance(route, Caller):
            if route not in self._network.callers:
                raise PeerLost("the caller is no longer connected")
            channel, endpoint = self._network.callers[route]
            channel._mailbox.append(Received(endpoint, data))
            return
        if " " in route.host:
            raise PeerLost(f"{route.address} cannot be called")
        line = self._calls.get(route)
        if line is None:
            line = self._calls[route] = _Line(Caller(b"%d" % next(self._network.names)))
            self._network.callers[line.caller] = (self, route)
        line.waiting.append(data)
        self._deliver(route)

    def _deliver(self, endpoint: Endpoint) -> None:
        line = self._calls[endpoint]
        if line.reached is None:
            line.reached = self._network.bound.get(endpoint)
        if line.reached is not None:
            line.reached._mailbox.extend(Received(line.caller, data) for data in line.waiting)
            line.waiting.clear()

    def hang_up(self, endpoint: Endpoint) -> None:
        line = self._calls.pop(endpoint, None)
        if line is not None:
            self._network.callers.pop(line.caller, None)
            self._mailbox = deque(each for each in self._mailbox if each.route != endpoint)

    def close(self) -> None:
        for endpoint in list(self._calls):
            self.hang_up(endpoint)
        if self._network.bound.get(Endpoint(HOST, self.port)) is self:
            del self._network.bound[Endpoint(HOST, self.port)]
        for caller in [c for c, (_, endpoint) in self._network.callers.items() if endpoint.port == self.port]:
            del self._network.callers[caller]
