"""A transport within one process: really copies memory, and misbehaves by script.

Invariant: like the real one, it moves bytes and delivers notifications only while somebody polls, and an operation that
was reported failed may still land. A `Fabric` joins the transports of one test and holds its script. Not thread-safe.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbaton.errors import PeerLost, PostFailed, RegistrationFailed
from kvbaton.geometry.descriptors import Descriptors
from kvbaton.transport.base import AgentName, Arrival, Handle, Operation, Progress, Span, Transport


@dataclass(frozen=True)
class Fate:
    """What the script decides about one operation."""

    delay_polls: int = 0
    fails_at_post: bool = False
    fails_at_poll: bool = False
    lands: bool = True
    notifies: int = 1


@dataclass
class Fabric:
    """The world that loopback transports share. `script` decides each operation's fate from its running number."""

    script: Callable[[int], Fate] = lambda _number: Fate()
    ends: dict[AgentName, LoopbackTransport] = field(default_factory=dict)
    num_operations: int = 0

    def decide(self) -> Fate:
        self.num_operations += 1
        return self.script(self.num_operations - 1)


@dataclass
class _Posted:
    operation: Operation
    peer: AgentName
    descriptors: Descriptors
    notification: bytes
    fate: Fate
    polls_left: int
    progress: Progress = Progress.MOVING


class LoopbackTransport(Transport):
    def __init__(self, agent_name: str, fabric: Fabric) -> None:
        self._name = AgentName(agent_name)
        self._fabric = fabric
        self._spans: list[Span] = []
        self._inbox: deque[Arrival] = deque()
        self._posted: dict[Handle, _Posted] = {}
        self._next_handle = 0
        self._peers: set[AgentName] = set()
        fabric.ends[self._name] = self

    def register(self, spans: Sequence[Span], memory_kind: str) -> None:
        if memory_kind != "DRAM":
            raise RegistrationFailed(f"loopback moves DRAM, not {memory_kind}")
        self._spans = list(spans)

    def local_metadata(self) -> bytes:
        return self._name.encode()

    def connect(self, metadata: bytes) -> AgentName:
        peer = AgentName(metadata.decode(errors="replace"))
        if peer not in self._fabric.ends:
            raise PeerLost(f"no loopback transport is called {peer!r}")
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: AgentName) -> None:
        self._peers.discard(peer)

    def post(
        self, operation: Operation, peer: AgentName, descriptors: Descriptors, their_device_id: int, notification: bytes
    ) -> Handle:
        fate = self._fabric.decide()
        other = self._reach(peer)
        if fate.fails_at_post:
            raise PostFailed(f"scripted: {operation.value} to {peer} cannot be posted")
        self._require_registered(descriptors.our_address.tolist(), descriptors.length_bytes.tolist())
        other._require_registered(descriptors.their_address.tolist(), descriptors.length_bytes.tolist())  # noqa: SLF001
        handle = Handle(self._next_handle)
        self._next_handle += 1
        self._posted[handle] = _Posted(operation, peer, descriptors, notification, fate, fate.delay_polls)
        return handle

    def _reach(self, peer: AgentName) -> LoopbackTransport:
        other = self._fabric.ends.get(peer)
        if peer not in self._peers or other is None:
            raise PostFailed(f"{peer} is not connected")
        return other

    def _require_registered(self, addresses: list[int], lengths: list[int]) -> None:
        for address, length in zip(addresses, lengths, strict=True):
            if not any(s.address <= address and address + length <= s.address + s.num_bytes for s in self._spans):
                raise PostFailed(f"{length} bytes at {address} are not registered by {self._name}")

    def poll(self, handle: Handle) -> Progress:
        posted = self._posted[handle]
        if posted.progress is not Progress.MOVING:
            return posted.progress
        other = self._fabric.ends.get(posted.peer)
        if other is not None and posted.polls_left > 0:
            posted.polls_left -= 1
            return Progress.MOVING
        if other is None or posted.fate.fails_at_poll:
            posted.progress = Progress.FAILED
            return posted.progress
        self._land(posted, other)
        posted.progress = Progress.MOVED
        return posted.progress

    def _land(self, posted: _Posted, other: LoopbackTransport) -> None:
        if posted.fate.lands:
            d = posted.descriptors
            rows = zip(d.our_address.tolist(), d.their_address.tolist(), d.length_bytes.tolist(), strict=True)
            for ours, theirs, length in rows:
                source, target = (ours, theirs) if posted.operation is Operation.WRITE else (theirs, ours)
                ctypes.memmove(target, source, length)
        if posted.notification:
            other._inbox.extend([Arrival(self._name, posted.notification)] * posted.fate.notifies)

    def release(self, handle: Handle) -> bool:
        posted = self._posted.get(handle)
        if posted is not None and posted.progress is Progress.MOVING:
            return False
        self._posted.pop(handle, None)
        return True

    def notify(self, peer: AgentName, notification: bytes) -> None:
        fate = self._fabric.decide()
        other = self._reach(peer)
        if fate.fails_at_post:
            raise PostFailed(f"scripted: {peer} cannot be notified")
        other._inbox.extend([Arrival(self._name, notification)] * fate.notifies)  # noqa: SLF001

    def arrivals(self) -> list[Arrival]:
        news = list(self._inbox)
        self._inbox.clear()
        return news

    def close(self) -> None:
        self._posted.clear()
        self._peers.clear()
        self._fabric.ends.pop(self._name, None)
