"""Finds free TCP ports, and says who holds one that is not.

Invariant: ports handed out by one `Ports` differ from each other. Between choosing a port and an engine's bind another
process may still take it; the engine then dies at start and its log says so.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

from kvbaton.launch.remedy import usage_error

_MAX_PORT = 65535
_MAX_TRIES = 100


class Ports:
    """Hands out ports, each once."""

    def __init__(self, avoid: Iterable[int] = ()) -> None:
        """`avoid` are wanted by somebody for sure, and so never handed out as free ones."""
        self._avoided = set(avoid)

    def take(self, host: str, wanted: int, *, what: str) -> int:
        """`wanted`, or any free port where it is 0. UsageError names the port, what it is for and who holds it."""
        if wanted:
            if not _can_bind(host, wanted):
                raise usage_error(
                    f"port {wanted} for {what} is in use{_holder(wanted)}",
                    "Stop that process, or choose another port (0 takes a free one).",
                )
            self._avoided.add(wanted)
            return wanted
        while True:
            port = _any_free(host)
            if port not in self._avoided:
                self._avoided.add(port)
                return port

    def take_run(self, host: str, count: int, *, what: str) -> int:
        """The first of `count` consecutive free ports. UsageError when none can be found."""
        for _ in range(_MAX_TRIES):
            first = _any_free(host)
            run = range(first, first + count)
            is_free = run[-1] <= _MAX_PORT and self._avoided.isdisjoint(run)
            if is_free and all(_can_bind(host, port) for port in run):
                self._avoided.update(run)
                return first
        raise usage_error(f"no {count} consecutive free ports for {what}", "Name the first of them yourself.")


def preferred(host: str, wanted: int) -> int:
    """`wanted` if it is free, else 0."""
    return wanted if _can_bind(host, wanted) else 0


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As servers do: a connection of an earlier run in TIME_WAIT does not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise usage_error(f"port {port} needs more rights than this user has", "Use a port above 1023.") from None
        except OSError:
            return False
    return True


def _any_free(host: str) -> int:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise usage_error(f"host {host!r}: {error.strerror}", "Use an address of this machine.") from None
        port: int = probe.getsockname()[1]
    return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _holder(port: int) -> str:
    """` by 'python3' (pid 17)`, or nothing where this user may not know."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            try:
                return f" by {psutil.Process(connection.pid).name()!r} (pid {connection.pid})"
            except psutil.Error:
                return f" by pid {connection.pid}"
    return ""
