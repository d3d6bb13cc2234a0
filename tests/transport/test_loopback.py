"""What the loopback does by script, which no real library can be asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvbaton.errors import PostFailed
from kvbaton.transport.base import Operation, Progress, Transport
from kvbaton.transport.loopback import Fabric, Fate, LoopbackTransport
from tests.transport.kit import Pair, make_end, make_pair

WRITE, READ = Operation.WRITE, Operation.READ
both = pytest.mark.parametrize("operation", Operation)
PIECES = [(0, 0, 8), (100, 100, 8), (200, 200, 8)]


def scripted(*fates: Fate, connect_polls: int = 0) -> Pair:
    fabric = Fabric(script=lambda number: dict(enumerate(fates)).get(number, Fate()))
    fabric.connect_polls = lambda: connect_polls
    make: Callable[[str], Transport] = lambda name: LoopbackTransport(name, fabric)  # noqa: E731
    pair = make_pair(make)
    pair.a.memory[:], pair.b.memory[:] = 1, 2
    return pair


def num_landed(pair: Pair, operation: Operation) -> int:
    memory, value = (pair.b.memory, 1) if operation is WRITE else (pair.a.memory, 2)
    return sum(int(memory[start] == value) for start, _, _ in PIECES)


@both
def test_parts_land_early_and_the_rest_at_the_end(operation: Operation) -> None:
    pair = scripted(Fate(delay_polls=3, num_landed_early=2))
    handle = pair.post(operation, PIECES)
    seen = []
    for _ in range(4):
        pair.a.transport.poll(handle)
        seen.append(num_landed(pair, operation))
    assert seen == [2, 2, 2, 3]
    assert pair.a.transport.poll(handle) is Progress.MOVED


@both
def test_a_failed_operation_moves_on_until_it_is_released(operation: Operation) -> None:
    pair = scripted(Fate(fails_at_poll=True, keeps_moving=True, num_refusals=2))
    handle = pair.post(operation, PIECES)
    assert pair.a.transport.poll(handle) is Progress.FAILED
    seen = []
    for is_released in (False, False, True):
        assert pair.a.transport.release(handle) is is_released
        seen.append(num_landed(pair, operation))
    assert seen == [1, 2, 3]


@both
def test_a_post_that_fails_may_have_moved_parts(operation: Operation) -> None:
    pair = scripted(Fate(fails_at_post=True, num_landed_early=1))
    with pytest.raises(PostFailed, match="scripted"):
        pair.post(operation, PIECES)
    assert num_landed(pair, operation) == 1


def test_a_moving_operation_is_not_released() -> None:
    pair = scripted(Fate(delay_polls=2))
    handle = pair.post(WRITE, PIECES)
    assert not pair.a.transport.release(handle)
    assert num_landed(pair, WRITE) == 0


def test_notifications_are_lost_doubled_late_overtaken_and_damaged() -> None:
    fates = [Fate(notifies=0), Fate(notifies=2), Fate(notification_delay=1), Fate(corrupts_notification=True), Fate()]
    pair = scripted(*fates)
    for number in range(len(fates)):
        pair.a.transport.notify(pair.b_at_a, b"%d" % number)
    assert [each.data for each in pair.b.transport.arrivals()] == [b"1", b"1", b"\xcc", b"4"]
    assert [each.data for each in pair.b.transport.arrivals()] == [b"2"]
    assert pair.b.transport.arrivals() == []


def test_a_slow_link_carries_nothing_until_it_is_up() -> None:
    pair = scripted(connect_polls=3)
    handle = pair.post(WRITE, PIECES, b"landed")
    pair.a.transport.notify(pair.b_at_a, b"hello")
    pair.a.transport.poll(handle)
    pair.a.transport.poll(handle)
    assert pair.b.transport.arrivals() == []
    assert num_landed(pair, WRITE) == 0
    assert pair.finish(handle, num_notifications=2)


def test_who_has_not_noticed_that_a_peer_closed_still_copies_into_it() -> None:
    """As over shared memory."""
    pair = scripted()
    pair.b.transport.close()
    with pytest.raises(PostFailed, match="gone"):
        pair.post(WRITE, PIECES)
    assert num_landed(pair, WRITE) == 3
    pair.a.transport.arrivals()
    pair.b.memory[:] = 9
    with pytest.raises(PostFailed, match="gone"):
        pair.post(WRITE, PIECES)
    assert (pair.b.memory == 9).all()


def test_nothing_of_an_old_incarnation_reaches_the_new_one_of_the_same_name() -> None:
    pair = scripted(Fate(delay_polls=5))
    handle = pair.post(WRITE, PIECES, b"landed")
    pair.b.transport.close()
    reborn = make_end(lambda name: LoopbackTransport(name, pair.a.transport._fabric), "engine b/0/1", seed=4)  # type: ignore[attr-defined]
    before = reborn.memory.copy()
    assert pair.a.transport.poll(handle) is Progress.FAILED
    assert reborn.transport.arrivals() == []
    assert (reborn.memory == before).all()


def test_a_second_thread_is_noticed() -> None:
    pair = scripted()
    caught = list[BaseException]()

    def use() -> None:
        try:
            pair.a.transport.arrivals()
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(caught) == 1
