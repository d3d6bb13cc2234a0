"""The router as a process: `serve(config)` runs until SIGTERM or SIGINT, then drains and returns.

Invariant: a signal stops accepting at once, open streams go on for at most `drain_s`, and the process ends with
status 0; a second SIGINT ends it at once. Read next: `app.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from kvbaton.errors import UsageError
from kvbaton.router.app import build_app
from kvbaton.router.settings import RouterConfig

__all__ = ["RouterConfig", "RouterServer", "serve"]

log = logging.getLogger("kvbaton.router")

_CLIENT_KEEPALIVE_S = 60


class RouterServer(uvicorn.Server):
    """Ends with status 0 after a signal; uvicorn's own would raise the signal anew once it has drained."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(config),
                lifespan="on",
                log_level=config.log_level,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_CLIENT_KEEPALIVE_S,
                timeout_graceful_shutdown=math.ceil(config.drain_s),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(config: RouterConfig) -> None:
    """Serves until told to stop. Blocks; call from the main thread.

    Raises UsageError if the address or the trace file cannot be opened.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = _listen(config)
    with listener:
        server = RouterServer(config)
        host, port = listener.getsockname()[:2]
        log.info("router on http://%s:%d, %s: %s", host, port, config.direction.value, config)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))


def _listen(config: RouterConfig) -> socket.socket:
    """Bound before anything else starts, so that a taken port is one clear error."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise UsageError(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Prefers uvloop where it is installed: less time per chunk of a stream."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop  # noqa: PLC0415 - optional

    return uvloop.new_event_loop
