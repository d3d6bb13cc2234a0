"""The seam between the runtime and whatever moves bytes. Two implementations pass one conformance kit.

Once it is set up (`register`, `local_metadata`), every method is called by the one thread that owns the transport; none may
block on the network. Next: nixl.py.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from kvbaton.geometry.descriptors import Descriptors

AgentName = NewType("AgentName", str)
"""A transport's name for one end of a link; chosen by whoever opened that end."""

Handle = NewType("Handle", int)
"""A posted operation, until released."""


class Operation(enum.Enum):
    WRITE = "write"
    READ = "read"


class Progress(enum.Enum):
    MOVING = "moving"
    MOVED = "moved"
    FAILED = "failed"


@dataclass(frozen=True)
class Span:
    """A contiguous piece of memory to register."""

    address: int
    num_bytes: int
    device_id: int


@dataclass(frozen=True)
class Arrival:
    """A notification, and the end of the link it came from."""

    sender: AgentName
    data: bytes


class Transport(ABC):
    @abstractmethod
    def register(self, spans: Sequence[Span], memory_kind: str) -> None:
        """Memory that operations may touch from now on. Once, before `local_metadata`. Raises RegistrationFailed."""

    @abstractmethod
    def local_metadata(self) -> bytes:
        """What a peer's `connect` needs. Raises RegistrationFailed."""

    @abstractmethod
    def connect(self, metadata: bytes) -> AgentName:
        """The peer whose metadata this is. Starts connecting, does not wait. Raises PeerLost on unusable metadata."""

    @abstractmethod
    def disconnect(self, peer: AgentName) -> None:
        """Nothing new can be posted to this peer. What is in flight with it goes on, and is polled and released. Idempotent."""

    @abstractmethod
    def post(
        self, operation: Operation, peer: AgentName, descriptors: Descriptors, their_device_id: int, notification: bytes
    ) -> Handle:
        """Starts moving bytes; after a WRITE has landed the peer receives `notification`. It may land in any order, and in
        parts. Raises PostFailed; it may have moved bytes, but will move none.
        """

    @abstractmethod
    def poll(self, handle: Handle) -> Progress:
        """Where the operation stands; also lets the library work. A failed one may move bytes until it is released.

        FAILED within bounded time when the peer's process is gone; MOVING for as long as it only stands still.
        """

    @abstractmethod
    def release(self, handle: Handle) -> bool:
        """True: no byte of it moves any more. False while that cannot be said, always while it is MOVING: ask again.

        Only `close` ends an operation that does not end by itself. Idempotent.
        """

    @abstractmethod
    def notify(self, peer: AgentName, notification: bytes) -> None:
        """Sends `notification` without data, in no order against data posted before. Raises PostFailed."""

    @abstractmethod
    def arrivals(self) -> list[Arrival]:
        """What peers sent since the last call; also lets the library work. Raises TransportError when that is broken."""

    @abstractmethod
    def close(self) -> None:
        """Releases handles, links and registrations. No operation of ours touches our memory any more, and nothing that a peer
        has posted before lands in it.

        Two holes that no library closes: what our WRITE has already handed to the network may still land at its peer, and a
        peer on this host, which copies by itself inside `post`, may do so until its library has noticed. Idempotent.
        """
