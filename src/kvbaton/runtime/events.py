"""What crosses between the engine's thread and the driver's: commands in, results out.

Invariant: the engine's thread appends and takes under no lock held across I/O; it never waits for the driver except,
bounded, in `Results.wait` when it has nothing else to do. Next: driver.py.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvbaton.protocol.params import DecodeTicket
from kvbaton.types import RequestId, TransferId


class Fence(Protocol):
    """A point in a device's stream of work, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """The device is past it. Does not wait."""
        ...


BlockLists: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids per cache group, in token order from token 0."""


@dataclass(frozen=True)
class SourceOpened:
    """A prefill request of this transfer is in the engine."""

    transfer_id: TransferId
    request_id: RequestId


@dataclass(frozen=True)
class SourceAdvanced:
    """Tokens [0, num_tokens) of the prompt have final KV in `blocks`."""

    transfer_id: TransferId
    request_id: RequestId
    generation: int
    num_tokens: int
    is_last: bool
    blocks: BlockLists
    fence: Fence | None = None
    """What must pass before the KV is really there; None where the forward is over when the engine says so (CPU)."""


@dataclass(frozen=True)
class SourceRevoked:
    """The engine takes the blocks away (preemption) and is about to overwrite them; `released` is set once none is read."""

    transfer_id: TransferId
    request_id: RequestId
    released: threading.Event


@dataclass(frozen=True)
class SourceFinished:
    """The engine is done with the request. `is_held`: it keeps the blocks until the request is among `Results.sent`."""

    transfer_id: TransferId
    request_id: RequestId
    is_held: bool
    is_aborted: bool


@dataclass(frozen=True)
class DestinationOpened:
    """Blocks for tokens [first_token, num_tokens) are allocated and wait for their KV."""

    ticket: DecodeTicket
    request_id: RequestId
    first_token: int
    num_tokens: int
    blocks: BlockLists


@dataclass(frozen=True)
class DestinationCancelled:
    """The request that waits was given up; its blocks come back through `Results.received`."""

    request_id: RequestId


@dataclass(frozen=True)
class NothingNeeded:
    """The decode request wants no KV: the source need not hold any for it."""

    ticket: DecodeTicket


Command: TypeAlias = (
    SourceOpened
    | SourceAdvanced
    | SourceRevoked
    | SourceFinished
    | DestinationOpened
    | DestinationCancelled
    | NothingNeeded
)


@dataclass
class Batch:
    """Requests the driver is done with. `failed` is a subset of `received`."""

    sent: set[RequestId] = field(default_factory=set)
    received: set[RequestId] = field(default_factory=set)
    failed: dict[RequestId, str] = field(default_factory=dict)


class Results:
    """The driver's outbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._batch = Batch()
        self._fatal: BaseException | None = None

    def sent(self, request_id: RequestId) -> None:
        with self._lock:
            self._batch.sent.add(request_id)
            self._news.set()

    def received(self, request_id: RequestId, failure: str | None) -> None:
        with self._lock:
            self._batch.received.add(request_id)
            if failure is not None:
                self._batch.failed[request_id] = failure
            self._news.set()

    def fail(self, error: BaseException) -> None:
        """The driver's thread is dying of `error`."""
        with self._lock:
            self._fatal = error
            self._news.set()

    def take(self) -> Batch:
        """Everything since the last call. Raises the error the driver died of: an engine without driver must not live."""
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            batch, self._batch = self._batch, Batch()
            self._news.clear()
            return batch

    def wait(self, timeout_s: float) -> None:
        """Returns when there is something to take, at the latest after `timeout_s`."""
        self._news.wait(timeout_s)
