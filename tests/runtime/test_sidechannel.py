"""The side channel's words, held by the sockets and by the double that the other tests here stand on."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvbaton.errors import PeerLost, UsageError
from kvbaton.protocol.messages import MAX_MESSAGE_BYTES
from kvbaton.runtime import sidechannel
from kvbaton.runtime.sidechannel import MAX_RECEIVED, Caller, Endpoint, Received, SideChannel
from tests.runtime.memory_channel import HOST, MemoryChannel, Network

PATIENCE_S = 10.0
Open = Callable[[int], SideChannel]


@pytest.fixture(params=["sockets", "memory"])
def open_channel(request: pytest.FixtureRequest) -> Iterator[Open]:
    network, opened = Network(), list[SideChannel]()

    def make(port: int = 0) -> SideChannel:
        opened.append(SideChannel(HOST, port) if request.param == "sockets" else MemoryChannel(network, port))
        return opened[-1]

    yield make
    for channel in opened:
        channel.close()


def hear(channel: SideChannel, num_messages: int = 1) -> list[Received]:
    news, end_s = list[Received](), time.monotonic() + PATIENCE_S
    while len(news) < num_messages and time.monotonic() < end_s:
        channel.wait(0.05)
        news += channel.receive()
    assert len(news) == num_messages
    return news


def lose(channel: SideChannel) -> list[Endpoint]:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        channel.wait(0.05)
        if lost := channel.lost():
            return lost
    raise AssertionError("nothing was lost")


def say_until_lost(channel: SideChannel, route: Caller | Endpoint) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        channel.send(route, b"late")
        channel.wait(0.01)


def test_a_call_is_answered_by_the_route_it_came(open_channel: Open) -> None:
    a, b, c = open_channel(0), open_channel(0), open_channel(0)
    endpoint = Endpoint(HOST, a.port)
    b.send(endpoint, b"from b")
    c.send(endpoint, b"from c")
    for received in hear(a, 2):
        a.send(received.route, b"answer to " + received.data)
    assert hear(b) == [Received(endpoint, b"answer to from b")]
    assert hear(c) == [Received(endpoint, b"answer to from c")]


def test_messages_of_one_caller_keep_their_order(open_channel: Open) -> None:
    a, b = open_channel(0), open_channel(0)
    for number in range(50):
        b.send(Endpoint(HOST, a.port), b"%d" % number)
    news = hear(a, 50)
    assert [received.data for received in news] == [b"%d" % number for number in range(50)]
    assert len({received.route for received in news}) == 1


def test_a_flood_is_read_in_bounded_turns_and_nothing_of_it_is_lost(open_channel: Open) -> None:
    a, b = open_channel(0), open_channel(0)
    assert not a.is_behind
    num_sent, news = 3 * MAX_RECEIVED, list[Received]()
    for number in range(num_sent):
        b.send(Endpoint(HOST, a.port), b"%d" % number)
    was_behind, end_s = False, time.monotonic() + PATIENCE_S
    while len(news) < num_sent and time.monotonic() < end_s:
        time.sleep(0.05)  # so that more is there than one turn takes
        taken = a.receive()
        assert len(taken) <= MAX_RECEIVED
        assert a.is_behind == (len(taken) == MAX_RECEIVED)
        was_behind |= a.is_behind
        news += taken
    assert [received.data for received in news] == [b"%d" % number for number in range(num_sent)]
    assert was_behind


def test_what_was_said_before_hanging_up_still_arrives_but_cannot_be_answered(open_channel: Open) -> None:
    """What makes a late registration of somebody who gave up recognisable (runtime/source.py relies on it)."""
    a, b = open_channel(0), open_channel(0)
    b.send(Endpoint(HOST, a.port), b"hello")
    (received,) = hear(a)
    b.hang_up(Endpoint(HOST, a.port))
    with pytest.raises(PeerLost, match="no longer connected"):
        say_until_lost(a, received.route)


def test_after_hanging_up_a_call_is_a_new_caller(open_channel: Open) -> None:
    a, b = open_channel(0), open_channel(0)
    endpoint = Endpoint(HOST, a.port)
    b.send(endpoint, b"first")
    (first,) = hear(a)
    b.hang_up(endpoint)
    b.hang_up(endpoint)  # idempotent
    b.send(endpoint, b"second")
    (second,) = hear(a)
    assert first.route != second.route


def test_a_process_that_ends_is_lost_once(open_channel: Open) -> None:
    a, b = open_channel(0), open_channel(0)
    endpoint = Endpoint(HOST, a.port)
    b.send(endpoint, b"hello")
    hear(a)
    assert b.lost() == []
    a.close()
    assert lose(b) == [endpoint]
    assert b.lost() == []


def test_a_caller_that_nobody_knows_is_lost(open_channel: Open) -> None:
    with pytest.raises(PeerLost):
        open_channel(0).send(Caller(b"nobody"), b"hello")


@pytest.mark.parametrize("host", ["no host", "a b/c"])
def test_an_address_that_cannot_be_called_is_a_lost_peer(open_channel: Open, host: str) -> None:
    """Found: the socket library's own error came through and ended the transfer thread."""
    channel = open_channel(0)
    for _ in range(2):
        with pytest.raises(PeerLost, match="cannot be called"):
            channel.send(Endpoint(host, 1), b"hello")


def test_close_is_idempotent_and_waking_after_it_is_harmless(open_channel: Open) -> None:
    """Found: the wake-up wrote to a descriptor that could by then be another file's."""
    channel = open_channel(0)
    channel.close()
    channel.close()
    channel.wake()


def test_a_taken_port_is_named_with_the_remedy() -> None:
    first = SideChannel(HOST, 0)
    try:
        with pytest.raises(UsageError, match=rf"{HOST}:{first.port}.*side_channel_port"):
            SideChannel(HOST, first.port)
    finally:
        first.close()


def test_waking_ends_a_wait() -> None:
    channel = SideChannel(HOST, 0)
    began_s = time.monotonic()
    channel.wake()
    channel.wait(PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    channel.close()


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert Endpoint("::1", 7).address == "tcp://[::1]:7"


def test_a_connection_that_breaks_is_not_a_process_that_is_gone() -> None:
    """Found: a stopped process and a cut network were taken for death, and blocks given back that were still written."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    channel = SideChannel(HOST, 0)
    endpoint = Endpoint(HOST, port)
    channel.send(endpoint, b"hello")
    accepted, _ = listener.accept()
    accepted.close()
    again, _ = listener.accept()  # ZeroMQ's next try, or our look whether anybody is there
    again.close()
    for _ in range(10):
        channel.wait(0.02)
        assert channel.lost() == []
    listener.close()
    assert lose(channel) == [endpoint]
    channel.close()


def test_an_address_where_nobody_ever_listened_is_not_lost() -> None:
    """Whoever is started a little later is still reached; the caller's own deadline ends the waiting."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    listener.close()
    channel = SideChannel(HOST, 0)
    channel.send(Endpoint(HOST, port), b"hello")
    for _ in range(10):
        channel.wait(0.05)
        assert channel.lost() == []
    late = SideChannel(HOST, port)
    (received,) = hear(late)
    assert received.data == b"hello"
    for each in (late, channel):
        each.close()


def test_words_for_an_address_where_nobody_reads_are_dropped_in_the_end_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it does not count as lost: it may be alive, and writing into our blocks."""
    monkeypatch.setattr(sidechannel, "MAX_WAITING_OUT", 5)
    listener = socket.create_server((HOST, 0))
    channel = SideChannel(HOST, 0)
    endpoint = Endpoint(HOST, listener.getsockname()[1])
    with caplog.at_level(logging.WARNING, "vllm.kvbaton"):
        for _ in range(50):
            channel.send(endpoint, b"hello")
    assert channel.lost() == []
    assert [record.getMessage() for record in caplog.records] == [
        f"1 messages were dropped, the last to {endpoint.address}, which does not read."
    ]
    channel.close()
    listener.close()


def test_a_caller_that_does_not_read_is_lost_before_it_costs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidechannel, "MAX_WAITING_OUT", 5)
    monkeypatch.setattr(sidechannel, "MAX_WAITING_IN", 5)
    a, b = SideChannel(HOST, 0), SideChannel(HOST, 0)
    b.send(Endpoint(HOST, a.port), b"hello")
    (received,) = hear(a)

    def say_too_much() -> None:
        for _ in range(1000):
            a.send(received.route, bytes(1 << 20))
            time.sleep(0.001)

    with pytest.raises(PeerLost, match="no longer connected, or does not read"):
        say_too_much()
    for channel in (a, b):
        channel.close()


def test_too_large_a_message_ends_its_connection_and_no_other() -> None:
    a, b, c = (SideChannel(HOST, 0) for _ in range(3))
    endpoint = Endpoint(HOST, a.port)
    c.send(endpoint, b"before")
    hear(a)
    b.send(endpoint, bytes(MAX_MESSAGE_BYTES + 1))
    c.send(endpoint, b"after")
    (received,) = hear(a)
    assert received.data == b"after"
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        a.wait(0.02)
        assert a.receive() == []
    for channel in (a, b, c):
        channel.close()
