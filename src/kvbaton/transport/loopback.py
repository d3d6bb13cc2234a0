"""A transport within one process: really copies memory, and misbehaves by script.

Invariant: like the real one, it moves bytes and delivers notifications only while somebody polls, and an operation that
was reported failed may still land. A `Fabric` joins the transports of one test and holds its script. Of one thread: the
first that posts, polls, connects or listens is the only one that may.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbaton.errors import PeerLost, PostFailed, RegistrationFailed
from kvbaton.geometry.descriptors import Descriptors
from kvbaton.transport.base import AgentName, Arrival, Handle, Operation, Progress, Span, Transport


@dataclass(frozen=True)
class Fate:
    """What the script decides about one operation, or about one notification without data."""

    delay_polls: int = 0
    """How often it is looked at before it ends."""
    num_landed_early: int = 0
    """Descriptors that land at the first look, or before the post fails; the others when it ends."""
    fails_at_post: bool = False
    fails_at_poll: bool = False
    keeps_moving: bool = False
    """Failed, it moves one more descriptor whenever it is asked to be released, and the last one when it is."""
    num_refusals: int = 0
    """How often it is not released although it ended."""
    lands: bool = True
    notifies: int = 1
    """How often its notification comes."""
    notification_delay: int = 0
    """How often the receiver looks for arrivals before it comes; others overtake it."""
    corrupts_notification: bool = False


Witness = Callable[[Operation, int, int, int], None]
"""(operation, from where, to where, how many bytes): told of every piece just before it is copied."""


@dataclass
class Fabric:
    """The world that loopback transports share. `script` decides each operation's fate from its running number."""

    script: Callable[[int], Fate] = lambda _number: Fate()
    connect_polls: Callable[[], int] = lambda: 0
    """How often the one who connects lets its library work before a new link carries anything."""
    ends: dict[AgentName, LoopbackTransport] = field(default_factory=dict)
    witness: Witness | None = None
    num_operations: int = 0
    num_opened: int = 0

    def decide(self) -> Fate:
        self.num_operations += 1
        return self.script(self.num_operations - 1)


@dataclass
class Posted:
    """An operation until it is released."""

    operation: Operation
    link: _Link
    pieces: list[tuple[int, int, int]]
    """(our address, their address, length in bytes), those that are still to be moved."""
    notification: bytes
    fate: Fate
    polls_left: int
    refusals_left: int
    progress: Progress = Progress.MOVING

    @property
    def may_move(self) -> bool:
        """Bytes may move until it is released, unless it is done or one of the two ends is gone."""
        is_over = self.progress is Progress.MOVED or (self.progress is Progress.FAILED and not self.fate.keeps_moving)
        return bool(self.pieces) and not is_over and not self.link.end.is_closed

    @property
    def end(self) -> LoopbackTransport:
        return self.link.end


@dataclass
class _Link:
    end: LoopbackTransport
    polls_left: int
    has_noticed: bool = False
    """That the end is closed. Until then a post still copies, as it does over shared memory."""
    waiting: list[tuple[bytes, Fate]] = field(default_factory=list)
    """Notifications without data that were sent before the link was up."""


@dataclass
class _Incoming:
    arrival: Arrival
    delay: int


class LoopbackTransport(Transport):
    def __init__(self, agent_name: str, fabric: Fabric) -> None:
        self.name = AgentName(agent_name)
        self.is_closed = False
        self.posted: dict[Handle, Posted] = {}
        self._fabric = fabric
        self._spans: list[Span] = []
        self._inbox: list[_Incoming] = []
        self._next_handle = 0
        self._links: dict[AgentName, _Link] = {}
        self._owner: int | None = None
        self._metadata = b"loopback %d %s" % (fabric.num_opened, agent_name.encode())
        fabric.num_opened += 1
        fabric.ends[self.name] = self

    def register(self, spans: Sequence[Span], memory_kind: str) -> None:
        if memory_kind != "DRAM":
            raise RegistrationFailed(f"loopback moves DRAM, not {memory_kind}")
        self._spans = list(spans)

    def local_metadata(self) -> bytes:
        return self._metadata

    @property
    def has_arrivals(self) -> bool:
        return bool(self._inbox)

    def _require_one_thread(self) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        assert self._owner == thread, f"two threads use the transport of {self.name}"

    # -- links -------------------------------------------------------------------------------------------------------

    def connect(self, metadata: bytes) -> AgentName:
        self._require_one_thread()
        for end in self._fabric.ends.values():
            if end.local_metadata() == metadata:
                self._links[end.name] = _Link(end, self._fabric.connect_polls())
                return end.name
        raise PeerLost(f"no loopback transport describes itself as {metadata[:80]!r}")

    def disconnect(self, peer: AgentName) -> None:
        self._require_one_thread()
        self._links.pop(peer, None)

    def _reach(self, peer: AgentName) -> _Link:
        link = self._links.get(peer)
        if link is None:
            raise PostFailed(f"{peer} is not connected")
        return link

    def _work(self) -> None:
        """What the library does whenever it is called: links come up, and what waited for them goes out."""
        for link in self._links.values():
            link.has_noticed = link.end.is_closed
            if link.polls_left > 0:
                link.polls_left -= 1
            elif link.waiting:
                waiting, link.waiting = link.waiting, []
                for notification, fate in waiting:
                    self._deliver(link, notification, fate)

    # -- operations --------------------------------------------------------------------------------------------------

    def post(
        self, operation: Operation, peer: AgentName, descriptors: Descriptors, their_device_id: int, notification: bytes
    ) -> Handle:
        self._require_one_thread()
        fate = self._fabric.decide()
        link = self._reach(peer)
        table = (descriptors.our_address, descriptors.their_address, descriptors.length_bytes)
        pieces = list(zip(*(column.tolist() for column in table), strict=True))
        for ours, theirs, length in pieces:
            self._require_registered(ours, length)
            link.end._require_registered(theirs, length)  # noqa: SLF001
        posted = Posted(operation, link, pieces, notification, fate, fate.delay_polls, fate.num_refusals)
        if link.end.is_closed:
            self._land(posted, 0 if link.has_noticed else len(pieces))
            raise PostFailed(f"{peer} is gone")
        if fate.fails_at_post:
            self._land(posted, fate.num_landed_early)
            raise PostFailed(f"scripted: {operation.value} to {peer} cannot be posted")
        handle = Handle(self._next_handle)
        self._next_handle += 1
        self.posted[handle] = posted
        return handle

    def _require_registered(self, address: int, length: int) -> None:
        if not any(s.address <= address and address + length <= s.address + s.num_bytes for s in self._spans):
            raise PostFailed(f"{length} bytes at {address} are not registered by {self.name}")

    def poll(self, handle: Handle) -> Progress:
        self._require_one_thread()
        self._work()
        posted = self.posted[handle]
        if posted.progress is not Progress.MOVING:
            return posted.progress
        if posted.end.is_closed:
            posted.progress = Progress.FAILED
            return posted.progress
        if posted.link.polls_left > 0:
            return posted.progress
        if posted.polls_left > 0:
            if posted.polls_left == posted.fate.delay_polls:
                self._land(posted, posted.fate.num_landed_early)
            posted.polls_left -= 1
            return posted.progress
        if posted.fate.fails_at_poll:
            posted.progress = Progress.FAILED
            return posted.progress
        self._land(posted, len(posted.pieces))
        self._deliver(posted.link, posted.notification, posted.fate)
        posted.progress = Progress.MOVED
        return posted.progress

    def _land(self, posted: Posted, num_pieces: int) -> None:
        landing = [posted.pieces.pop(0) for _ in range(min(max(num_pieces, 0), len(posted.pieces)))]
        if not posted.fate.lands:
            return
        for ours, theirs, length in landing:
            source, target = (ours, theirs) if posted.operation is Operation.WRITE else (theirs, ours)
            if self._fabric.witness is not None:
                self._fabric.witness(posted.operation, source, target, length)
            ctypes.memmove(target, source, length)

    def drift(self, num_pieces: int) -> None:
        """The network moves on, although the process of this end may stand still."""
        for posted in self.posted.values():
            if posted.progress is Progress.MOVING and posted.may_move and posted.link.polls_left == 0:
                self._land(posted, num_pieces)

    def release(self, handle: Handle) -> bool:
        self._require_one_thread()
        posted = self.posted.get(handle)
        if posted is None:
            return True
        if posted.progress is Progress.MOVING:
            return False
        is_refused = posted.refusals_left > 0
        if posted.may_move:
            self._land(posted, 1 if is_refused else len(posted.pieces))
        if is_refused:
            posted.refusals_left -= 1
            return False
        del self.posted[handle]
        return True

    # -- notifications -----------------------------------------------------------------------------------------------

    def notify(self, peer: AgentName, notification: bytes) -> None:
        self._require_one_thread()
        fate = self._fabric.decide()
        link = self._reach(peer)
        if fate.fails_at_post or link.end.is_closed:
            raise PostFailed(f"{peer} cannot be notified")
        if link.polls_left > 0:
            link.waiting.append((notification, fate))
        else:
            self._deliver(link, notification, fate)

    def _deliver(self, link: _Link, notification: bytes, fate: Fate) -> None:
        if notification and not link.end.is_closed:
            data = bytes(byte ^ 0xFF for byte in notification) if fate.corrupts_notification else notification
            for _ in range(fate.notifies):
                link.end.hear(self.name, data, fate.notification_delay)

    def hear(self, sender: AgentName, data: bytes, delay: int = 0) -> None:
        """A notification, of whoever is said to have sent it, is on its way to this end."""
        self._inbox.append(_Incoming(Arrival(sender, data), delay))

    def arrivals(self) -> list[Arrival]:
        self._require_one_thread()
        self._work()
        if not self._inbox:
            return []
        news = [each.arrival for each in self._inbox if each.delay == 0]
        self._inbox = [each for each in self._inbox if each.delay > 0]
        for each in self._inbox:
            each.delay -= 1
        return news

    def close(self) -> None:
        self.is_closed = True
        self.posted.clear()
        self._links.clear()
        self._inbox.clear()
        if self._fabric.ends.get(self.name) is self:
            del self._fabric.ends[self.name]
