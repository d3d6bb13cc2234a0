"""The router's settings: one frozen struct, checked when built, with messages a user can act on.

Read next: `serve.py`, which takes it.
"""

from __future__ import annotations

import math
from urllib.parse import urlsplit

import msgspec

from kvbaton.errors import UsageError
from kvbaton.router.policy import Policy
from kvbaton.types import Direction

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a router is told. No P URL means plain routing to D, without transfers.

    Raises UsageError when built with a value that cannot work.
    """

    decode_urls: tuple[str, ...]
    prefill_urls: tuple[str, ...] = ()
    direction: Direction = Direction.PUSH
    policy: Policy = Policy.LEAST_IN_FLIGHT
    host: str = "127.0.0.1"
    port: int = 8000
    """0 means any free port."""
    trace_path: str | None = None
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 300.0
    """The whole of P's leg, its queue included. In push this also bounds how long D may hold blocks for a silent P."""
    decode_timeout_s: float = 1800.0
    """Until D's first byte; for an answer that is not a stream, until all of it."""
    idle_timeout_s: float = 300.0
    """Between two pieces of a stream."""
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 60.0
    """One probe, the warm-up prefill included; an engine's first request may be slow."""
    max_body_bytes: int = 64 * 1024 * 1024
    drain_s: float = 30.0
    """How long open streams may go on after SIGTERM."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("prefill_urls", "decode_urls"):
            urls = tuple(_root_url(url, name) for url in getattr(self, name))
            msgspec.structs.force_setattr(self, name, urls)
        self._check_urls()
        for name in _DURATIONS:
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} must be a positive number of seconds, got {value!r}.")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise UsageError(f"drain_s must not be negative, got {self.drain_s!r}.")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must lie in 0..65535, got {self.port!r}.")
        if self.max_body_bytes <= 0:
            raise UsageError(f"max_body_bytes must be positive, got {self.max_body_bytes!r}.")
        if self.log_level not in LOG_LEVELS:
            raise UsageError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}.")

    def _check_urls(self) -> None:
        if not self.decode_urls:
            raise UsageError("The router needs at least one decode URL.")
        seen: set[str] = set()
        for url in (*self.prefill_urls, *self.decode_urls):
            if url in seen:
                raise UsageError(f"{url} is given twice; every instance has one role and is named once.")
            seen.add(url)


_DURATIONS = (
    "connect_timeout_s",
    "prefill_timeout_s",
    "decode_timeout_s",
    "idle_timeout_s",
    "probe_interval_s",
    "probe_timeout_s",
)


def _root_url(url: str, name: str) -> str:
    """`url` as scheme, host and port only. Raises UsageError for anything else."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{name}: {url!r} is not a URL ({error}).") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{name}: {url!r} should look like http://host:port.")
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise UsageError(
            f"{name}: {url!r} should be the engine's root, http://host:port, with nothing before or after."
        )
    if port == 0:
        raise UsageError(f"{name}: {url!r} has port 0.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"
