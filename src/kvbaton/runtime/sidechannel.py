"""The sockets of the side channel: one that is bound and answers, one per endpoint we call. Bytes in, bytes out.

Invariant: nothing here blocks except `wait`, and that ends early when `wake` is called from another thread. A called
endpoint is reported by `lost` once it is certain that nobody listens there any more. A connection that broke for another
reason comes back by itself; what was on its way may be missing then, so whoever speaks here says important things again.
Every queue is bounded: what does not fit waits in the sender's, and there, in the end, is dropped. With a cluster key
nothing passes but between its holders. Next: membership.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass

import zmq

from kvbaton.cluster_key import ClusterKey
from kvbaton.errors import PeerLost, UsageError
from kvbaton.protocol.messages import MAX_MESSAGE_BYTES
from kvbaton.runtime.membership import HANDSHAKE_FAILED, Doorkeeper, Membership, Watch
from kvbaton.runtime.seldom import Seldom

logger = logging.getLogger("vllm.kvbaton")

_HEARTBEAT_INTERVAL_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_PROBE_TIMEOUT_S = 5.0
_HANDSHAKE_TIMEOUT_MS = 10_000
"""A stranger that connects and says nothing is put out after this."""

MAX_WAITING_IN = 256
"""Messages of one caller that wait here; more wait in its own queue."""

MAX_WAITING_OUT = 10_000
"""Messages that wait for one peer; more are dropped. Enough for a silent peer's whole deadline under full load."""

MAX_RECEIVED = 256
"""Messages taken in one turn, at least as many as one caller can have waiting: a turn with fewer has left none behind."""

NO_KEY_THERE = "one of the two has a cluster key and the other has none. Give both the same file in cluster_key_file"


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class Caller:
    """Whoever called our bound socket, by the name ZeroMQ gave the connection."""

    identity: bytes


@dataclass(frozen=True)
class Received:
    route: Caller | Endpoint
    data: bytes


class _Line:
    """One outgoing connection and its monitor."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, membership: Membership | None
    ) -> None:
        """Raises PeerLost when ZeroMQ cannot make sense of the address, or has no socket left."""
        try:
            self.socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise PeerLost(f"no socket to call {endpoint.address}: {error}") from error
        _configure(self.socket, endpoint.host)
        if membership is not None:
            membership.call(self.socket)
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        try:
            self.watch = Watch(context, self.socket, events | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise PeerLost(f"no socket to watch the call of {endpoint.address}: {error}") from error
        self.was_connected = False
        self.is_probed = False
        self.is_gone = False
        self.is_in_trouble = False
        """The connection broke, or could not be made again, and nothing has been done about it."""
        self.refusal: str | None = None
        """Why whoever listens there will never talk to us."""
        self.num_broken_off = 0
        """Handshakes, one after the other, that the other side ended without a word."""
        try:
            self.socket.connect(endpoint.address)
        except zmq.ZMQError as error:
            self.close()
            raise PeerLost(f"{endpoint.address} cannot be called: {error}") from error

    def look(self) -> None:
        """What ZeroMQ has said about the connection is taken in."""
        for event, value in self.watch.events():
            if event == zmq.EVENT_CONNECTED:
                self.was_connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_broken_off = 0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self.refusal = NO_KEY_THERE
            elif event & HANDSHAKE_FAILED:
                self.num_broken_off += 1
            else:
                self.is_in_trouble = self.was_connected

    def close(self) -> None:
        self.watch.close()
        self.socket.close(linger=0)


def _configure(zmq_socket: zmq.Socket[bytes], host: str) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.SNDHWM, MAX_WAITING_OUT)
    zmq_socket.setsockopt(zmq.RCVHWM, MAX_WAITING_IN)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    zmq_socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    if ":" in host:
        zmq_socket.setsockopt(zmq.IPV6, 1)


class SideChannel:
    is_behind = False
    """More was waiting than the last `receive` took: what comes next may have lain in a queue for any time."""

    def __init__(self, host: str, port: int, key: ClusterKey | None = None) -> None:
        """Bound to `host`:`port`, any free port for 0; with `key`, for its holders only.

        Raises UsageError naming the port when it is taken, or when this ZeroMQ cannot use a key.
        """
        self._membership = None if key is None else Membership(key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = None if self._membership is None else Doorkeeper(self._context, self._membership)
        self._bound = self._context.socket(zmq.ROUTER)
        _configure(self._bound, host)
        self._bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._membership is not None:
            self._membership.be_called(self._bound)
        # Without a key, those that only broke off are nothing: whoever looks whether a port is open does that.
        told = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if self._membership is None else HANDSHAKE_FAILED
        self._watch = Watch(self._context, self._bound, told)
        self._turned_away, self._dropped = Seldom(), Seldom()
        try:
            self._bound.bind(Endpoint(host, port).address if port else f"{Endpoint(host, 0).address[:-1]}*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UsageError(
                f"the side channel cannot bind to {host}:{port}: {error}. Set side_channel_port to a free port, or to 0 "
                "for any, and side_channel_host to an address of this machine."
            ) from error
        self.port = int(self._bound.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._lines: dict[Endpoint, _Line] = {}
        self._wake_lock = threading.Lock()  # a descriptor's number is given to another file once it is closed
        self._wake_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._bound, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._poller.register(self._watch.socket, zmq.POLLIN)
        if self._door is not None:
            self._poller.register(self._door.socket, zmq.POLLIN)

    def wake(self) -> None:
        """Ends a `wait` in progress, or the next one. From any thread, also after `close`."""
        with self._wake_lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float) -> None:
        """Returns when something came in, when woken, or after `timeout_s`."""
        if timeout_s < 0.001:
            # ZeroMQ counts in whole milliseconds; nothing needs to cut so short a nap shorter.
            time.sleep(max(timeout_s, 0.0))
        else:
            self._poller.poll(int(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):
            if self._wake_fd is not None:
                os.eventfd_read(self._wake_fd)

    def receive(self) -> list[Received]:
        """What has come in, of each socket no more than MAX_RECEIVED; `is_behind` says whether that left something."""
        self._look_at_the_door()
        self.is_behind = False
        news = [Received(Caller(frames[0]), frames[1]) for frames in self._take(self._bound) if len(frames) == 2]
        for endpoint, line in self._lines.items():
            news += [Received(endpoint, data) for frames in self._take(line.socket) for data in frames]
        return news

    def _take(self, zmq_socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        taken: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(taken) < MAX_RECEIVED:
                taken.append(zmq_socket.recv_multipart(zmq.NOBLOCK))
        self.is_behind |= len(taken) == MAX_RECEIVED
        return taken

    def _look_at_the_door(self) -> None:
        if self._door is not None:
            self._door.answer()
        num_failed = len(self._watch.events())
        if num_failed and (count := self._turned_away.add(num_failed)):
            ours = "has none" if self._membership is None else "has one"
            logger.warning(
                "%d calls to the side channel were turned away: they ended before the caller had shown the same cluster "
                "key (this engine %s). See docs/security.md.", count, ours,
            )  # fmt: skip

    def lost(self) -> list[Endpoint]:
        """Endpoints we were connected to and where nobody listens any more, since the last call; their lines are closed."""
        for endpoint, line in self._lines.items():
            line.look()
            if line.is_in_trouble and not line.is_probed:
                line.is_probed = True
                threading.Thread(target=self._probe, args=(endpoint, line), name="kvbaton-probe", daemon=True).start()
            line.is_in_trouble = False
        dead = [endpoint for endpoint, line in self._lines.items() if line.is_gone]
        for endpoint in dead:
            self.hang_up(endpoint)
        return dead

    def refused(self) -> list[tuple[Endpoint, str]]:
        """Endpoints where somebody listens who will not talk to us, and why, since the last call; their lines are closed.

        Whoever talked to us there before is another process, and gone: a process keeps its key for life.
        """
        found: list[tuple[Endpoint, str]] = []
        for endpoint, line in list(self._lines.items()):
            line.look()
            if line.refusal is not None:
                found.append((endpoint, line.refusal))
                self.hang_up(endpoint)
        return found

    def suspicion(self, endpoint: Endpoint) -> str | None:
        """Why nobody may have answered there: a caller with another key is told nothing, it is hung up on."""
        line = self._lines.get(endpoint)
        if line is None or line.num_broken_off == 0:
            return None
        ours = "has no cluster key" if self._membership is None else "has a cluster key"
        return (
            f"somebody listens there and broke off {line.num_broken_off} times as the connection was made. This engine "
            f"{ours}; the other one may have another. Give both the same file in cluster_key_file"
        )

    def _probe(self, endpoint: Endpoint, line: _Line) -> None:
        """In a thread of its own, because looking a name up may take long. Only a refusal proves that a process is gone."""
        try:
            socket.create_connection((endpoint.host, endpoint.port), _PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            line.is_gone = True
            self.wake()
        except OSError:
            pass  # unreachable or silent: the process may live
        line.is_probed = False

    def send(self, route: Caller | Endpoint, data: bytes) -> None:
        """Queues `data`; an endpoint is connected on first use. What an endpoint's full queue has no room for is dropped.

        Raises PeerLost when a caller is gone or does not read, or an endpoint's address cannot be called at all.
        """
        if isinstance(route, Caller):
            try:
                self._bound.send_multipart([route.identity, data], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise PeerLost(f"the caller is no longer connected, or does not read: {error}") from error
            return
        line = self._lines.get(route)
        if line is None:
            line = self._lines[route] = _Line(self._context, route, self._membership)
            self._poller.register(line.socket, zmq.POLLIN)
            self._poller.register(line.watch.socket, zmq.POLLIN)
        try:
            line.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            # Not a lost peer: it may be alive and writing. What matters is said again, or ends by its deadline.
            if count := self._dropped.add():
                logger.warning("%d messages were dropped, the last to %s, which does not read.", count, route.address)

    def hang_up(self, endpoint: Endpoint) -> None:
        """Closes the line to `endpoint`. Idempotent."""
        line = self._lines.pop(endpoint, None)
        if line is not None:
            self._poller.unregister(line.socket)
            self._poller.unregister(line.watch.socket)
            line.close()

    def close(self) -> None:
        """Idempotent."""
        if self._bound.closed:
            return
        for endpoint in list(self._lines):
            self.hang_up(endpoint)
        self._watch.close()
        self._bound.close(linger=0)
        if self._door is not None:
            self._door.close()
        self._context.term()
        with self._wake_lock:
            if self._wake_fd is not None:
                os.close(self._wake_fd)
            self._wake_fd = None
