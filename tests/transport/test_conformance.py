"""The contract of transport/base.py, sentence by sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from kvbaton.errors import PeerLost, PostFailed, RegistrationFailed
from kvbaton.transport.base import AgentName, Arrival, Operation, Progress, Span, Transport
from tests.transport.kit import NUM_BYTES, Pair, make_end, make_pair, until

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


@both
def test_adjacent_pieces_are_moved_each_to_its_place(pair: Pair, operation: Operation) -> None:
    """Neighbours here that part ways there, and the other way round; a library may join what it can."""
    pieces = [(0, 0, 64), (64, 64, 64), (128, 512, 64), (192, 576, 1), (193, 128, 3), (1024, 131, 61), (2048, 192, 64)]
    wanted = expected(pair, operation, pieces)
    pair.finish(pair.post(operation, pieces))
    assert contents(pair) == wanted


@both
def test_a_piece_of_no_bytes_moves_nothing(pair: Pair, operation: Operation) -> None:
    wanted = expected(pair, operation, [(8, 24, 16)])
    pair.finish(pair.post(operation, [(0, 0, 0), (8, 24, 16), (100, 200, 0)]))
    assert contents(pair) == wanted


@both
def test_all_registered_bytes_can_be_moved_to_the_last(pair: Pair, operation: Operation) -> None:
    wanted = expected(pair, operation, [(0, 0, NUM_BYTES)])
    pair.finish(pair.post(operation, [(0, 0, NUM_BYTES)]))
    assert contents(pair) == wanted


def test_each_notification_comes_after_its_own_data_also_among_many(pair: Pair) -> None:
    pair.b.memory[:] = 0
    pair.a.memory[:] = 7
    handles = [pair.post(WRITE, [(1000 * i, 1000 * i, 1000)], b"%d" % i) for i in range(30)]
    seen = set[int]()

    def is_all() -> bool:
        for handle in handles:
            pair.a.transport.poll(handle)
        for arrival in pair.b.transport.arrivals():
            i = int(arrival.data)
            assert (pair.b.memory[1000 * i : 1000 * i + 1000] == 7).all()
            seen.add(i)
        return len(seen) == 30

    until(is_all)
    for handle in handles:
        pair.finish(handle)


def test_what_was_disconnected_in_flight_ends_as_any_other_and_is_released_then(pair: Pair) -> None:
    wanted = expected(pair, WRITE, PIECES)
    handle = pair.post(WRITE, PIECES, b"landed")
    pair.a.transport.disconnect(pair.b_at_a)
    pair.finish(handle, num_notifications=1)
    assert contents(pair) == wanted
    with pytest.raises(PostFailed):
        pair.post(WRITE, PIECES)


@both
def test_a_peer_may_be_left_and_met_again_while_something_is_in_flight(pair: Pair, operation: Operation) -> None:
    first = pair.post(operation, PIECES)
    pair.a.transport.disconnect(pair.b_at_a)
    assert pair.a.transport.connect(pair.b.transport.local_metadata()) == pair.b_at_a
    second = pair.post(operation, [(40000, 40000, 8)])
    pair.finish(first)
    pair.finish(second)
    pair.finish(pair.post(operation, PIECES))


def test_a_peer_that_closed_is_lost_within_bounded_time_and_others_are_not(
    make: Callable[[str], Transport], pair: Pair
) -> None:
    pair.finish(pair.post(WRITE, PIECES))
    third = make_end(make, "engine c/0/1", seed=3)
    c_at_a = pair.a.transport.connect(third.transport.local_metadata())
    pair.b.transport.close()
    until(lambda: ends_badly(pair))
    before = pair.b.memory.copy()
    pair.a.memory[:] = 77
    assert ends_badly(pair)
    assert (pair.b.memory == before).all()
    third.transport.connect(pair.a.transport.local_metadata())
    pair.finish_with(third, pair.a.transport.post(WRITE, c_at_a, pair.descriptors_to(third, [(0, 0, 100)]), 0, b""))
    assert (third.memory[:100] == pair.a.memory[:100]).all()


def ends_badly(pair: Pair) -> bool:
    """Posting raises, or the operation fails; either is an honest answer. Who has not noticed yet may also succeed."""
    pair.a.transport.arrivals()
    try:
        handle = pair.post(WRITE, [(0, 0, 100)])
    except PostFailed:
        return True
    until(lambda: pair.a.transport.poll(handle) is not Progress.MOVING)
    progress = pair.a.transport.poll(handle)
    until(lambda: pair.a.transport.release(handle))
    return progress is Progress.FAILED


def test_a_new_incarnation_under_the_same_name_is_met_with_its_new_metadata(make: Callable[[str], Transport]) -> None:
    old = make_pair(make)
    old.finish(old.post(WRITE, PIECES))
    old.b.transport.close()
    until(lambda: ends_badly(old))
    reborn = make_end(make, "engine b/0/1", seed=5)
    old.a.transport.disconnect(old.b_at_a)
    assert old.a.transport.connect(reborn.transport.local_metadata()) == old.b_at_a
    reborn.transport.connect(old.a.transport.local_metadata())
    before = old.b.memory.copy()
    pair = Pair(old.a, reborn, old.a_at_b, old.b_at_a)
    wanted = expected(pair, WRITE, PIECES)
    pair.finish(pair.post(WRITE, PIECES, b"again"), num_notifications=1)
    assert contents(pair) == wanted
    assert (old.b.memory == before).all()


@pytest.mark.parametrize("is_released", [True, False])
def test_close_after_operations_failed_is_quiet(pair: Pair, is_released: bool) -> None:
    """Found: UCX aborted the process that closed right after a post to a dead peer had failed."""
    pair.finish(pair.post(WRITE, PIECES))
    pair.b.transport.close()
    if is_released:
        ends_badly(pair)
    else:
        with contextlib.suppress(PostFailed):
            pair.post(WRITE, PIECES)
    pair.a.transport.close()


def test_the_name_is_what_was_given(pair: Pair) -> None:
    """The runtime recognises engines by it, slashes and spaces included."""
    assert (pair.a_at_b, pair.b_at_a) == ("engine a/0/1", "engine b/0/1")
