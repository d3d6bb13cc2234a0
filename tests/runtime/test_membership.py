"""The cluster key on the side channel: members talk, everybody else gets nothing, leaves nothing, and is told why."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from kvbaton.cluster_key import ClusterKey
from kvbaton.runtime import sidechannel
from kvbaton.runtime.membership import Membership
from kvbaton.runtime.sidechannel import Endpoint, Received, SideChannel
from kvbaton.types import RequestId
from tests.runtime.memory_channel import HOST
from tests.runtime.world import Engine, World

KEY, OTHER = ClusterKey(b"k" * 31 + b"1"), ClusterKey(b"k" * 31 + b"2")
PATIENCE_S = 10.0
LONG_ENOUGH_S = 0.5
"""Several of ZeroMQ's tries to connect."""

Open = Callable[[ClusterKey | None], SideChannel]


@pytest.fixture
def open_channel() -> Iterator[Open]:
    opened = list[SideChannel]()

    def make(key: ClusterKey | None) -> SideChannel:
        opened.append(SideChannel(HOST, 0, key))
        return opened[-1]

    yield make
    for channel in opened:
        channel.close()


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    yield dealer
    dealer.close()
    context.term()


def turn(*channels: SideChannel) -> list[Received]:
    news = list[Received]()
    for channel in channels:
        channel.wait(0.02)
        news += channel.receive()
    return news


def until(condition: Callable[[], object], *channels: SideChannel) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        turn(*channels)


def hears_nothing(channel: SideChannel, dealer: zmq.Socket[bytes]) -> bool:
    end_s = time.monotonic() + LONG_ENOUGH_S
    while time.monotonic() < end_s:
        if turn(channel) or dealer.poll(0):
            return False
    return True


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def talk(a: SideChannel, b: SideChannel) -> None:
    endpoint = Endpoint(HOST, a.port)
    b.send(endpoint, b"hello")
    news = list[Received]()

    def is_heard() -> bool:
        news.extend(turn(a))
        return bool(news)

    until(is_heard, b)
    a.send(news[0].route, b"answer")
    until(lambda: Received(endpoint, b"answer") in turn(b), a)


def test_members_talk_both_ways(open_channel: Open) -> None:
    talk(open_channel(KEY), open_channel(KEY))


def knows_nothing(dealer: zmq.Socket[bytes]) -> None:
    del dealer


def has_another_key(dealer: zmq.Socket[bytes]) -> None:
    Membership(OTHER).call(dealer)


def knows_the_public_key(dealer: zmq.Socket[bytes]) -> None:
    public, secret = zmq.curve_keypair()
    dealer.setsockopt(zmq.CURVE_SERVERKEY, Membership(KEY)._called[0])
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)


def knows_both_public_keys(dealer: zmq.Socket[bytes]) -> None:
    knows_the_public_key(dealer)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, Membership(KEY)._caller[0])


@pytest.mark.parametrize("prepare", [knows_nothing, has_another_key, knows_the_public_key, knows_both_public_keys])
def test_a_stranger_gets_nothing_leaves_nothing_and_disturbs_nobody(
    open_channel: Open,
    stranger: zmq.Socket[bytes],
    prepare: Callable[[zmq.Socket[bytes]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded, member = open_channel(KEY), open_channel(KEY)
    talk(guarded, member)
    num_before = num_descriptors()
    prepare(stranger)
    with caplog.at_level(logging.WARNING, "vllm.kvbaton"):
        stranger.connect(f"tcp://{HOST}:{guarded.port}")
        stranger.send(b"let me in")
        assert hears_nothing(guarded, stranger)
    talk(guarded, member)
    stranger.disconnect(f"tcp://{HOST}:{guarded.port}")
    until(lambda: num_descriptors() <= num_before + 1, guarded)  # its own reconnecting may hold one
    assert caplog.text.count("turned away") == 1


def test_a_stranger_that_says_nothing_is_put_out(open_channel: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidechannel, "_HANDSHAKE_TIMEOUT_MS", 200)
    guarded = open_channel(KEY)
    silent = [socket.create_connection((HOST, guarded.port)) for _ in range(20)]
    for each in silent:
        each.settimeout(PATIENCE_S)
        until(lambda each=each: _is_closed(each), guarded)  # type: ignore[misc]
        each.close()
    talk(guarded, open_channel(KEY))


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(100):
            pass
    except ConnectionResetError:
        pass
    return True


def why_not(waiting: SideChannel, endpoint: Endpoint) -> str | None:
    """What the waiting side can say, by now, of the silence there."""
    assert waiting.lost() == []
    for refuser, why in waiting.refused():
        assert refuser == endpoint
        return why
    return waiting.suspicion(endpoint)


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, None), (None, KEY), (KEY, OTHER)])
def test_keys_that_differ_are_named_by_the_side_that_waits(
    open_channel: Open, ours: ClusterKey | None, theirs: ClusterKey | None
) -> None:
    waiting, other = open_channel(ours), open_channel(theirs)
    endpoint = Endpoint(HOST, other.port)
    assert why_not(waiting, endpoint) is None
    waiting.send(endpoint, b"hello")
    found = list[str]()

    def is_named() -> bool:
        found.append(why_not(waiting, endpoint) or "")
        return "cluster_key_file" in found[-1]

    until(is_named, waiting, other)


def pair_with(ours: ClusterKey | None, theirs: ClusterKey | None) -> tuple[World, Engine, Engine]:
    """A prefill side with `theirs` and a decode side with `ours`, joined by real sockets."""
    keys = iter((theirs, ours))
    world = World(make_channel=lambda _network, port: SideChannel(HOST, port, next(keys)))
    return world, *world.pair()


def hand_over(world: World, p: Engine, d: Engine) -> None:
    """Returns when the decode side's request is over, one way or the other."""
    d.open_destination(p.ticket(), 8, [1, 2])
    p.prefill(8, [1, 2])
    end_s = time.monotonic() + PATIENCE_S
    while not d.received:
        assert time.monotonic() < end_s
        world.now_s += 0.05
        for each in (p, d):
            each.channel.wait(0.02)
            each.turn()


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, None), (None, KEY), (KEY, OTHER)])
def test_the_request_that_waits_fails_within_seconds_and_names_the_key(
    ours: ClusterKey | None, theirs: ClusterKey | None
) -> None:
    world, p, d = pair_with(ours, theirs)
    hand_over(world, p, d)
    assert "cluster_key_file" in d.failures[RequestId("d")]
    assert world.now_s < 1010.0
    for each in (p, d):
        each.crash()


@pytest.mark.parametrize("key", [KEY, None])
def test_a_request_between_members_is_handed_over(key: ClusterKey | None) -> None:
    world, p, d = pair_with(key, key)
    hand_over(world, p, d)
    assert d.failures == {}
    assert d.holds([1, 2], p, [1, 2])
    for each in (p, d):
        each.crash()


@pytest.mark.parametrize("first", [KEY, None])
def test_a_process_restarted_with_a_key_at_the_address_is_refused_where_the_first_was_known(
    first: ClusterKey | None,
) -> None:
    """Nothing hangs: the transfers that the first process had fail, or are answered for by their deadlines."""
    waiting, other = SideChannel(HOST, 0, first), SideChannel(HOST, 0, first)
    talk(other, waiting)
    endpoint = Endpoint(HOST, other.port)
    other.close()
    again = SideChannel(HOST, endpoint.port, OTHER)
    until(lambda: waiting.refused() or waiting.suspicion(endpoint) or waiting.lost(), waiting, again)
    waiting.close()
    again.close()


def test_nobody_is_suspected_where_nobody_listens(open_channel: Open) -> None:
    waiting, gone = open_channel(KEY), open_channel(KEY)
    endpoint = Endpoint(HOST, gone.port)
    gone.close()
    waiting.send(endpoint, b"hello")
    end_s = time.monotonic() + LONG_ENOUGH_S
    while time.monotonic() < end_s:
        turn(waiting)
        assert not waiting.refused()
        assert not waiting.lost()
    assert waiting.suspicion(endpoint) is None


def test_the_keys_are_the_same_everywhere_and_differ_by_end() -> None:
    first, second = Membership(KEY), Membership(ClusterKey(b"k" * 31 + b"1"))
    assert (first._called, first._caller) == (second._called, second._caller)
    assert first._called != first._caller
    assert first._called != Membership(OTHER)._called
    assert first.is_of_caller(z85.decode(first._caller[0]))
    assert not first.is_of_caller(z85.decode(first._called[0]))
    assert not first.is_of_caller(b"")


def test_nothing_shows_a_secret() -> None:
    assert repr(Membership(KEY)) == "Membership(secret)"


def test_what_passes_on_the_wire_is_not_readable() -> None:
    """A tap between two members sees neither the message nor either public key."""
    server = SideChannel(HOST, 0, KEY)
    tap = socket.create_server((HOST, 0))
    client = SideChannel(HOST, 0, KEY)
    client.send(Endpoint(HOST, tap.getsockname()[1]), b"a prompt's block ids")
    left, _ = tap.accept()
    right = socket.create_connection((HOST, server.port))
    for each in (left, right):
        each.setblocking(False)
    seen, news = bytearray(), list[Received]()

    def relay() -> bool:
        for source, sink in ((left, right), (right, left)):
            try:
                data = source.recv(4096)
            except BlockingIOError:
                continue
            seen.extend(data)
            sink.sendall(data)
        news.extend(turn(server))
        return bool(news)

    until(relay, client)
    assert news[0].data == b"a prompt's block ids"
    assert b"CURVE" in seen
    for hidden in (news[0].data, z85.decode(Membership(KEY)._called[0]), z85.decode(Membership(KEY)._caller[0])):
        assert bytes(hidden) not in bytes(seen)
    for closing in (client, server, left, right, tap):
        closing.close()
