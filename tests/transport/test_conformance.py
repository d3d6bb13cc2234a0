"""The contract of transport/base.py, sentence by sentence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvbaton.errors import PeerLost, PostFailed, RegistrationFailed
from kvbaton.transport.base import AgentName, Arrival, Operation, Progress, Span, Transport
from tests.transport.kit import NUM_BYTES, Pair, make_end, until

WRITE, READ = Operation.WRITE, Operation.READ
both = pytest.mark.parametrize("operation", Operation)
PIECES = [(0, 4096, 1000), (5000, 128, 1), (20000, 30001, 4097)]


def expected(pair: Pair, operation: Operation, pieces: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
    """What both memories must hold after the operation; everything else is a canary."""
    a, b = pair.a.memory.copy(), pair.b.memory.copy()
    for ours, theirs, length in pieces:
        if operation is WRITE:
            b[theirs : theirs + length] = a[ours : ours + length]
        else:
            a[ours : ours + length] = b[theirs : theirs + length]
    return a.tobytes(), b.tobytes()


def contents(pair: Pair) -> tuple[bytes, bytes]:
    return pair.a.memory.tobytes(), pair.b.memory.tobytes()


@both
def test_the_described_bytes_move_and_no_other(pair: Pair, operation: Operation) -> None:
    wanted = expected(pair, operation, PIECES)
    pair.finish(pair.post(operation, PIECES))
    assert contents(pair) == wanted


@both
def test_many_descriptors_in_one_operation(pair: Pair, operation: Operation) -> None:
    order = np.random.default_rng(3).permutation(2000).tolist()
    pieces = [(16 * index, 16 * place + 3, 13) for index, place in enumerate(order)]
    wanted = expected(pair, operation, pieces)
    pair.finish(pair.post(operation, pieces))
    assert contents(pair) == wanted


@both
def test_several_operations_at_once(pair: Pair, operation: Operation) -> None:
    wanted = expected(pair, operation, [(100 * i, 300 * i, 100) for i in range(20)])
    handles = [pair.post(operation, [(100 * i, 300 * i, 100)]) for i in range(20)]
    assert len(set(handles)) == 20
    for handle in handles:
        pair.finish(handle)
    assert contents(pair) == wanted


def test_a_writes_notification_comes_from_its_sender_and_not_before_its_data(pair: Pair) -> None:
    wanted = expected(pair, WRITE, PIECES)
    handle = pair.post(WRITE, PIECES, b"landed \x00\xff")

    arrivals = list[Arrival]()

    def is_notified() -> bool:
        pair.a.transport.poll(handle)
        arrivals.extend(pair.b.transport.arrivals())
        return bool(arrivals)

    until(is_notified)
    assert contents(pair) == wanted
    assert [(each.sender, each.data) for each in arrivals] == [(pair.a_at_b, b"landed \x00\xff")]
    pair.finish(handle)


def test_every_notification_comes_exactly_once(pair: Pair) -> None:
    handles = [pair.post(WRITE, [(i, i, 1)], b"%d" % i) for i in range(10)]
    arrivals = [each for handle in handles for each in pair.finish(handle)]

    def is_all() -> bool:
        arrivals.extend(pair.b.transport.arrivals())
        pair.a.transport.arrivals()
        return len(arrivals) >= 10

    until(is_all)
    assert sorted(each.data for each in arrivals) == [b"%d" % i for i in range(10)]
    assert pair.b.transport.arrivals() == []


def test_an_operation_without_notification_is_silent(pair: Pair) -> None:
    pair.finish(pair.post(WRITE, PIECES))
    pair.finish(pair.post(READ, PIECES))
    assert pair.b.transport.arrivals() == []


def test_notify_brings_bytes_without_data(pair: Pair) -> None:
    before = contents(pair)
    pair.a.transport.notify(pair.b_at_a, b"hello \x00")
    arrivals = list[Arrival]()

    def is_notified() -> bool:
        pair.a.transport.arrivals()
        arrivals.extend(pair.b.transport.arrivals())
        return bool(arrivals)

    until(is_notified)
    assert [(each.sender, each.data) for each in arrivals] == [(pair.a_at_b, b"hello \x00")]
    assert contents(pair) == before


def test_both_ends_may_post(pair: Pair) -> None:
    swapped = Pair(pair.b, pair.a, pair.b_at_a, pair.a_at_b)
    first = pair.post(WRITE, [(0, 0, 100)])
    second = swapped.post(WRITE, [(200, 200, 100)])
    wanted_b, wanted_a = pair.a.memory[:100].copy(), pair.b.memory[200:300].copy()
    pair.finish(first)
    swapped.finish(second)
    assert (pair.b.memory[:100] == wanted_b).all()
    assert (pair.a.memory[200:300] == wanted_a).all()


def test_a_moved_operation_stays_moved_until_released(pair: Pair) -> None:
    handle = pair.post(WRITE, PIECES)
    until(lambda: pair.b.transport.arrivals() == [] and pair.a.transport.poll(handle) is Progress.MOVED)
    assert pair.a.transport.poll(handle) is Progress.MOVED
    assert pair.a.transport.release(handle)
    assert pair.a.transport.release(handle)  # idempotent


@both
@pytest.mark.parametrize(
    "piece",
    [(NUM_BYTES - 10, 0, 11), (0, NUM_BYTES - 10, 11), (NUM_BYTES + 4096, 0, 8), (0, NUM_BYTES + 4096, 8)],
    ids=["across our end", "across their end", "beyond ours", "beyond theirs"],
)
def test_memory_that_is_not_registered_cannot_be_moved(
    pair: Pair, operation: Operation, piece: tuple[int, int, int]
) -> None:
    before = contents(pair)
    with pytest.raises(PostFailed):
        pair.post(operation, [(0, 0, 8), piece])
    assert contents(pair) == before
    pair.finish(pair.post(operation, PIECES))  # the link is as good as before


@both
def test_nothing_can_be_posted_to_a_disconnected_peer(pair: Pair, operation: Operation) -> None:
    pair.finish(pair.post(operation, PIECES))
    pair.a.transport.disconnect(pair.b_at_a)
    pair.a.transport.disconnect(pair.b_at_a)  # idempotent
    with pytest.raises(PostFailed):
        pair.post(operation, PIECES)
    with pytest.raises(PostFailed):
        pair.a.transport.notify(pair.b_at_a, b"hello")


@both
def test_nothing_can_be_posted_to_a_stranger(pair: Pair, operation: Operation) -> None:
    with pytest.raises(PostFailed):
        pair.a.transport.post(operation, AgentName("nobody"), pair.descriptors(PIECES), 0, b"")
    with pytest.raises(PostFailed):
        pair.a.transport.notify(AgentName("nobody"), b"hello")


def test_a_peer_may_be_connected_again(pair: Pair) -> None:
    pair.finish(pair.post(WRITE, PIECES))
    pair.a.transport.disconnect(pair.b_at_a)
    assert pair.a.transport.connect(pair.b.transport.local_metadata()) == pair.b_at_a
    wanted = expected(pair, WRITE, [(1, 2, 3)])
    pair.finish(pair.post(WRITE, [(1, 2, 3)]))
    assert contents(pair) == wanted


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"\x00" * 64, b"\xff" * 64, "as metadata"])
def test_metadata_that_is_none_loses_the_peer(make: Callable[[str], Transport], metadata: bytes | str) -> None:
    end = make_end(make, "engine a/0/1", seed=1)
    whole = make_end(make, "engine b/0/1", seed=2).transport.local_metadata()
    with pytest.raises(PeerLost):
        end.transport.connect(whole[: len(whole) // 2] if isinstance(metadata, str) else metadata)


def test_memory_of_an_unknown_kind_cannot_be_registered(make: Callable[[str], Transport]) -> None:
    with pytest.raises(RegistrationFailed):
        make("engine a/0/1").register([Span(4096, 4096, 0)], "PAPER")


def test_close_is_idempotent_and_takes_what_is_in_flight_along(pair: Pair) -> None:
    pair.post(WRITE, PIECES, b"landed")
    pair.post(READ, PIECES)
    pair.a.transport.close()
    pair.a.transport.close()
    pair.b.transport.close()


def test_the_name_is_what_was_given(pair: Pair) -> None:
    """The runtime recognises engines by it, slashes and spaces included."""
    assert (pair.a_at_b, pair.b_at_a) == ("engine a/0/1", "engine b/0/1")
