"""The real sockets where something runs out, or somebody stands in between. Known holes are strict expected failures."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvbaton.cluster_key import ClusterKey
from kvbaton.errors import PeerLost
from kvbaton.runtime.sidechannel import Endpoint, SideChannel
from tests.runtime.memory_channel import HOST

KEY = ClusterKey(b"k" * 31 + b"1")
NUM_ADDRESSES = 400
"""A context has 1023 sockets, and a line takes three."""

PATIENCE_S = 10.0
LONG_ENOUGH_S = 1.0
"""Several of ZeroMQ's tries to connect anew."""


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(None, id="no key"),
        pytest.param(KEY, id="key"),
    ],
)
def test_more_addresses_than_sockets_are_lost_peers(key: ClusterKey | None) -> None:
    """Addresses come from params. Whatever else escapes here ends the transfer thread, and with it the engine.

    Without a key the count of sockets happens to run out at the one creation that is guarded.
    """
    channel = SideChannel(HOST, 0, key)
    num_lost = 0
    try:
        for number in range(NUM_ADDRESSES):
            try:
                channel.send(Endpoint(HOST, 20000 + number), b"hello")
            except PeerLost:
                num_lost += 1
    finally:
        # Not `channel.close()`: it waits for ever for the socket that the failed line left open.
        channel._context.destroy(linger=0)
    assert num_lost > 0


class Relay:
    """A port mapping: passes bytes on to `port`, until it is closed."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, outside = self._listener.accept()[0], socket.create_connection((HOST, self._target))
                self._connections += [inside, outside]
                for pair in ((inside, outside), (outside, inside)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def close(self) -> None:
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def channels() -> Iterator[tuple[SideChannel, SideChannel]]:
    pair = SideChannel(HOST, 0, KEY), SideChannel(HOST, 0, KEY)
    yield pair
    for channel in pair:
        channel.close()


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="docs/security.md: a refused connection counts as proof of death"
)
def test_an_engine_that_lives_is_not_gone_when_the_port_mapping_before_it_is(
    channels: tuple[SideChannel, SideChannel],
) -> None:
    """`advertised_host` may name a mapping. It refuses; the engine behind it lives, and may be writing to our blocks."""
    engine, reader = channels
    relay = Relay(engine.port)
    try:
        reader.send(Endpoint(HOST, relay.port), b"hello")
        end_s = time.monotonic() + PATIENCE_S
        while not (news := engine.receive()):
            assert time.monotonic() < end_s
            for channel in channels:
                channel.wait(0.02)
        assert news[0].data == b"hello"
    finally:
        relay.close()
    end_s = time.monotonic() + LONG_ENOUGH_S
    while time.monotonic() < end_s:
        reader.wait(0.02)
        assert reader.lost() == []
