"""What every transport must do, as code that knows none of them: two ends, each with one registered span of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.geometry.descriptors import Descriptors
from kvbaton.transport.base import AgentName, Arrival, Handle, Operation, Progress, Span, Transport

NUM_BYTES = 1 << 16
PATIENCE_S = 20.0
Piece = tuple[int, int, int]
"""(our offset, their offset, length in bytes)"""


@dataclass
class End:
    transport: Transport
    memory: npt.NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


@dataclass
class Pair:
    """`a` and `b`, registered and introduced to each other."""

    a: End
    b: End
    a_at_b: AgentName
    b_at_a: AgentName

    def descriptors(self, pieces: Sequence[Piece]) -> Descriptors:
        """From a's point of view."""
        return self.descriptors_to(self.b, pieces)

    def descriptors_to(self, other: End, pieces: Sequence[Piece]) -> Descriptors:
        return describe_pieces(self.a.address, other.address, pieces)

    def post(self, operation: Operation, pieces: Sequence[Piece], notification: bytes = b"") -> Handle:
        return self.a.transport.post(operation, self.b_at_a, self.descriptors(pieces), 0, notification)

    def finish(self, handle: Handle, num_notifications: int = 0) -> list[Arrival]:
        """The operation has moved its bytes and is released; what arrived at b meanwhile. Both ends let their library work."""
        return self.finish_with(self.b, handle, num_notifications)

    def finish_with(self, other: End, handle: Handle, num_notifications: int = 0) -> list[Arrival]:
        arrivals = list[Arrival]()

        def is_done() -> bool:
            arrivals.extend(other.transport.arrivals())
            self.a.transport.arrivals()
            return self.a.transport.poll(handle) is Progress.MOVED and len(arrivals) >= num_notifications

        until(is_done)
        until(lambda: self.a.transport.release(handle))
        return arrivals


def describe_pieces(our_address: int, their_address: int, pieces: Sequence[Piece]) -> Descriptors:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return Descriptors(
        our_address=columns[:, 0] + our_address,
        their_address=columns[:, 1] + their_address,
        length_bytes=columns[:, 2].copy(),
    )


def make_end(make: Callable[[str], Transport], name: str, seed: int) -> End:
    memory = np.random.default_rng(seed).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    end = End(make(name), memory)
    end.transport.register([Span(end.address, NUM_BYTES, 0)], "DRAM")
    return end


def make_pair(make: Callable[[str], Transport]) -> Pair:
    a, b = make_end(make, "engine a/0/1", seed=1), make_end(make, "engine b/0/1", seed=2)
    b_at_a = a.transport.connect(b.transport.local_metadata())
    a_at_b = b.transport.connect(a.transport.local_metadata())
    return Pair(a, b, a_at_b, b_at_a)


def until(is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end_s, "nothing came of it in time"
        time.sleep(0.0002)
