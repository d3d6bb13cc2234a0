"""`kv_connector_extra_config`, decoded strictly: the connector's only configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvbaton.config import decode_config
from kvbaton.errors import UsageError

Positive = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    side_channel_host: str = "127.0.0.1"
    """Address to bind to, and the one given to decode engines."""

    side_channel_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of rank 0; rank r uses the r-th after it. 0 takes any free port (one rank per engine only)."""

    allow_unauthenticated_side_channel: bool = False
    """Must be set to bind to anything but loopback: whoever reaches the side channel can have KV written to it."""

    backends: tuple[str, ...] = ("UCX",)
    """NIXL backends to move bytes with."""

    trace_path: str | None = None
    """Where to append the timeline; {rank} is replaced by the rank."""

    lease_s: Positive = 30.0
    """How long the prefill side holds finished blocks without a sign of life from the decode side."""

    progress_timeout_s: Positive = 30.0
    """How long the decode side waits without a sign of life from the prefill side."""

    drain_timeout_s: Positive = 10.0
    """How long a cancelled transfer may take to come to rest before the peer is fenced."""

    idle_wait_s: Annotated[float, msgspec.Meta(ge=0, le=0.1)] = 0.005
    """In a step with nothing to compute, how long to sleep for news of a transfer."""

    report_wait_s: Positive = 5.0
    """A transfer that waits longer is named in the log with what it waits for; again at 30 s and each time that doubles."""

    is_streaming: bool = msgspec.field(name="streaming", default=True)
    """Write finished blocks while later chunks of the prompt compute."""


def read_settings(extra_config: Mapping[str, object], *, num_ranks: int) -> ConnectorSettings:
    """Raises UsageError naming the key."""
    settings = decode_config(extra_config, ConnectorSettings, what="kv_connector_extra_config")
    if not _is_loopback(settings.side_channel_host) and not settings.allow_unauthenticated_side_channel:
        raise UsageError(
            f"kv_connector_extra_config: side_channel_host is {settings.side_channel_host}, which other machines can "
            "reach, and the side channel is not authenticated yet. Keep it on loopback, or, on a network you trust, set "
            "allow_unauthenticated_side_channel to true."
        )
    if num_ranks > 1 and settings.side_channel_port == 0:
        raise UsageError(
            f"kv_connector_extra_config: side_channel_port is 0 but this engine has {num_ranks} ranks, which need "
            f"consecutive ports. Set side_channel_port to the first of {num_ranks} free ones."
        )
    return settings


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
