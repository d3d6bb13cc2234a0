"""The sockets of the side channel: one that is bound and answers, one per endpoint we call. Bytes in, bytes out.

Invariant: nothing here blocks except `wait`, and that ends early when `wake` is called from another thread. A called
endpoint is reported by `lost` once it is certain that nobody listens there any more. A connection that broke for another
reason comes back by itself; what was on its way may be missing then, so whoever speaks here says important things again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvbaton.errors import PeerLost, UsageError

_HEARTBEAT_INTERVAL_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_PROBE_TIMEOUT_S = 5.0


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

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> None:
        """Raises PeerLost when ZeroMQ cannot make sense of the address, or has no socket left."""
        try:
            self.socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise PeerLost(f"no socket to call {endpoint.address}: {error}") from error
        _configure(self.socket, endpoint.host)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self.was_connected = False
        self.is_probed = False
        self.is_refused = False
        try:
            self.socket.connect(endpoint.address)
        except zmq.ZMQError as error:
            self.close()
            raise PeerLost(f"{endpoint.address} cannot be called: {error}") from error

    def is_in_trouble(self) -> bool:
        """Since the last call the connection broke, or could not be made again."""
        is_in_trouble = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_CONNECTED:
                    self.was_connected = True
                else:
                    is_in_trouble = self.was_connected
        return is_in_trouble

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def _configure(zmq_socket: zmq.Socket[bytes], host: str) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.SNDHWM, 0)
    zmq_socket.setsockopt(zmq.RCVHWM, 0)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    if ":" in host:
        zmq_socket.setsockopt(zmq.IPV6, 1)


class SideChannel:
    def __init__(self, host: str, port: int) -> None:
        """Bound to `host`:`port`, any free port for 0. Raises UsageError naming the port when it is taken."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bound = self._context.socket(zmq.ROUTER)
        _configure(self._bound, host)
        self._bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
        """Everything that has come in."""
        news: list[Received] = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._bound.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 2:
                    news.append(Received(Caller(frames[0]), frames[1]))
        for endpoint, line in self._lines.items():
            with contextlib.suppress(zmq.Again):
                while True:
                    news.append(Received(endpoint, line.socket.recv(zmq.NOBLOCK)))
        return news

    def lost(self) -> list[Endpoint]:
        """Endpoints we were connected to and where nobody listens any more, since the last call; their lines are closed."""
        for endpoint, line in self._lines.items():
            if line.is_in_trouble() and not line.is_probed:
                line.is_probed = True
                threading.Thread(target=self._probe, args=(endpoint, line), name="kvbaton-probe", daemon=True).start()
        dead = [endpoint for endpoint, line in self._lines.items() if line.is_refused]
        for endpoint in dead:
            self.hang_up(endpoint)
        return dead

    def _probe(self, endpoint: Endpoint, line: _Line) -> None:
        """In a thread of its own, because looking a name up may take long. Only a refusal proves that a process is gone."""
        try:
            socket.create_connection((endpoint.host, endpoint.port), _PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            line.is_refused = True
            self.wake()
        except OSError:
            pass  # unreachable or silent: the process may live
        line.is_probed = False

    def send(self, route: Caller | Endpoint, data: bytes) -> None:
        """Queues `data`; an endpoint is connected on first use.

        Raises PeerLost when a caller is gone, or an endpoint's address cannot be called at all.
        """
        if isinstance(route, Caller):
            try:
                self._bound.send_multipart([route.identity, data], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise PeerLost(f"the caller is no longer connected: {error}") from error
            return
        line = self._lines.get(route)
        if line is None:
            line = self._lines[route] = _Line(self._context, route)
            self._poller.register(line.socket, zmq.POLLIN)
            self._poller.register(line.monitor, zmq.POLLIN)
        line.socket.send(data, zmq.NOBLOCK)

    def hang_up(self, endpoint: Endpoint) -> None:
        """Closes the line to `endpoint`. Idempotent."""
        line = self._lines.pop(endpoint, None)
        if line is not None:
            self._poller.unregister(line.socket)
            self._poller.unregister(line.monitor)
            line.close()

    def close(self) -> None:
        """Idempotent."""
        if self._bound.closed:
            return
        for endpoint in list(self._lines):
            self.hang_up(endpoint)
        self._bound.close(linger=0)
        self._context.term()
        with self._wake_lock:
            if self._wake_fd is not None:
                os.close(self._wake_fd)
            self._wake_fd = None
