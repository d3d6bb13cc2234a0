"""What only shows between two processes: a peer that is killed, one that stands still, one that comes back.

Found here, all with real NIXL: it releases an operation that still moves, and over TCP the bytes land afterwards, also what
is written into the blocks later; it calls everything failed that is in flight with a peer it forgets, and moves on; UCX
aborts the process that closes right after a post to a dead peer failed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from kvbaton.errors import PostFailed
from kvbaton.transport.base import AgentName, Handle, Operation, Progress, Span
from kvbaton.transport.nixl import NixlTransport
from tests.transport.kit import describe_pieces, until

pytestmark = pytest.mark.nixl

WRITE, READ = Operation.WRITE, Operation.READ
NUM_BYTES = 48 << 20
THEIRS, OURS, REUSED = 5, 1, 2
both = pytest.mark.parametrize("operation", Operation)
SPAWN = multiprocessing.get_context("spawn")


def serve(line: Connection) -> None:
    """A peer that lets its library work, and counts the bytes of a value in its memory when asked."""
    memory = np.full(NUM_BYTES, THEIRS, dtype=np.uint8)
    transport = NixlTransport("engine b/0/1")
    transport.register([Span(int(memory.ctypes.data), NUM_BYTES, 0)], "DRAM")
    line.send((transport.local_metadata(), int(memory.ctypes.data)))
    transport.connect(line.recv())
    arrived = list[bytes]()
    while True:
        arrived += [each.data for each in transport.arrivals()]
        time.sleep(0.0005)
        if line.poll():
            value = line.recv()
            line.send((int((memory == value).sum()), arrived))


class Other:
    """That process."""

    def __init__(self, transport: NixlTransport) -> None:
        self.line, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        metadata, self.address = self.line.recv()
        self.line.send(transport.local_metadata())
        self.agent: AgentName = transport.connect(metadata)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def count(self, value: int) -> tuple[int, list[bytes]]:
        """How many of its bytes have the value, and what arrived there."""
        self.line.send(value)
        until(self.line.poll)
        counted: tuple[int, list[bytes]] = self.line.recv()
        return counted

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()


class Ends:
    def __init__(self) -> None:
        self.memory = np.full(NUM_BYTES, OURS, dtype=np.uint8)
        self.transport = NixlTransport("engine a/0/1")
        self.transport.register([Span(int(self.memory.ctypes.data), NUM_BYTES, 0)], "DRAM")
        self.others = [Other(self.transport)]
        self.settle(self.post(WRITE, 64, b"warm"), Progress.MOVED)

    @property
    def other(self) -> Other:
        return self.others[-1]

    def post(self, operation: Operation, num_bytes: int = NUM_BYTES, notification: bytes = b"") -> Handle:
        pieces = describe_pieces(int(self.memory.ctypes.data), self.other.address, [(0, 0, num_bytes)])
        return self.transport.post(operation, self.other.agent, pieces, 0, notification)

    def work(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        until(lambda: self.transport.arrivals() == [] and time.monotonic() > end_s)

    def settle(self, handle: Handle, wanted: Progress) -> None:
        def is_over() -> bool:
            self.transport.arrivals()
            return self.transport.poll(handle) is not Progress.MOVING

        until(is_over)
        assert self.transport.poll(handle) is wanted
        until(lambda: self.transport.release(handle))


@pytest.fixture(params=["shared memory", "tcp"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    made = Ends()
    yield made
    for other in made.others:
        other.end()
    made.transport.close()


@both
def test_an_operation_with_a_process_that_is_killed_ends_within_bounded_time(ends: Ends, operation: Operation) -> None:
    handle = ends.post(operation)
    ends.other.signal(signal.SIGKILL)
    until(lambda: ends.transport.arrivals() == [] and ends.transport.poll(handle) is not Progress.MOVING)
    until(lambda: ends.transport.release(handle))
    ends.memory[:] = REUSED
    until(lambda: is_refused(ends, operation))
    ends.work(0.2)
    assert (ends.memory == REUSED).all()


def is_refused(ends: Ends, operation: Operation) -> bool:
    try:
        handle = ends.post(operation, 64)
    except PostFailed:
        return True
    until(lambda: ends.transport.arrivals() == [] and ends.transport.poll(handle) is not Progress.MOVING)
    progress = ends.transport.poll(handle)
    until(lambda: ends.transport.release(handle))
    return progress is Progress.FAILED


@pytest.mark.parametrize("is_left", [False, True], ids=["", "and left"])
@both
def test_an_operation_with_a_process_that_stands_still_is_not_let_go_of(
    ends: Ends, operation: Operation, is_left: bool
) -> None:
    ends.other.signal(signal.SIGSTOP)
    time.sleep(0.05)
    handle = ends.post(operation, notification=b"landed" if operation is WRITE else b"")
    if is_left:
        ends.transport.disconnect(ends.other.agent)
    ends.work(0.3)
    is_moving = ends.transport.poll(handle) is Progress.MOVING
    assert ends.transport.release(handle) is not is_moving
    ends.other.signal(signal.SIGCONT)
    if is_moving:
        ends.settle(handle, Progress.MOVED)
    if operation is READ:
        assert (ends.memory == np.where(np.arange(NUM_BYTES) < 64, OURS, THEIRS)).all()
    else:
        until(lambda: b"landed" in ends.other.count(OURS)[1])
        assert ends.other.count(OURS)[0] == NUM_BYTES


@both
def test_after_release_not_one_more_byte_moves(ends: Ends, operation: Operation) -> None:
    """Blocks get another owner the moment their operation is released."""
    ends.other.signal(signal.SIGSTOP)
    time.sleep(0.05)
    handle = ends.post(operation)
    ends.work(0.1)
    is_released = ends.transport.release(handle)
    if is_released:
        ends.memory[:] = REUSED
    ends.other.signal(signal.SIGCONT)
    if not is_released:
        until(lambda: ends.transport.arrivals() == [] and ends.transport.release(handle))
        ends.memory[:] = REUSED
    ends.work(0.5)
    assert (ends.memory == REUSED).all()
    assert ends.other.count(REUSED)[0] == 0


@both
def test_what_closes_with_a_process_that_stands_still_is_out_of_its_reach(ends: Ends, operation: Operation) -> None:
    ends.other.signal(signal.SIGSTOP)
    time.sleep(0.05)
    ends.post(operation, 1 << 20)
    ends.work(0.1)
    ends.transport.close()
    ends.memory[:] = REUSED
    ends.other.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert (ends.memory == REUSED).all()
    if operation is WRITE:  # over TCP the owner of what was to be read dies of it: "Fatal: ... Endpoint timeout"
        assert ends.other.count(REUSED)[0] == 0


def test_another_incarnation_at_the_place_of_a_killed_one_is_met(ends: Ends) -> None:
    ends.other.signal(signal.SIGKILL)
    with contextlib.suppress(PostFailed):
        handle = ends.post(WRITE, 64)
        until(lambda: ends.transport.arrivals() == [] and ends.transport.poll(handle) is not Progress.MOVING)
        ends.transport.release(handle)
    until(lambda: is_refused(ends, WRITE))
    ends.transport.disconnect(ends.other.agent)
    ends.others.append(Other(ends.transport))
    ends.settle(ends.post(WRITE, notification=b"again"), Progress.MOVED)
    until(lambda: b"again" in ends.other.count(OURS)[1])
    assert ends.other.count(OURS)[0] == NUM_BYTES


def test_who_closes_right_after_a_post_to_a_dead_process_failed_lives(ends: Ends) -> None:
    ends.other.signal(signal.SIGKILL)
    time.sleep(0.2)
    with contextlib.suppress(PostFailed):
        ends.post(WRITE, 64)
    ends.transport.close()
