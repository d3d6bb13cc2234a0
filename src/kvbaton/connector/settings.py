"""`kv_connector_extra_config`, decoded strictly: the connector's only configuration."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvbaton.config import decode_config
from kvbaton.errors import UsageError

Positive = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    side_channel_host: str = "127.0.0.1"
    """Address to bind to, and the one given to decode engines unless `advertised_host` is."""

    advertised_host: str | None = None
    """What decode engines are told to call, when it is not the address to bind to: behind 0.0.0.0, or a port mapping."""

    side_channel_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of rank 0; rank r uses the r-th after it. 0 takes any free port (one rank per engine only)."""

    cluster_key_file: str | None = None
    """The file that `kvbaton key new` made; the same key for every engine of the cluster. Only its path is ever shown."""

    allow_unauthenticated_side_channel: bool = False
    """Must be set to bind to anything but loopback without a key: whoever reaches the side channel can have KV written
    to it."""

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

    @property
    def peer_host(self) -> str:
        """Where decode engines are told to call us."""
        return self.advertised_host or self.side_channel_host


def read_settings(extra_config: Mapping[str, object], *, num_ranks: int) -> ConnectorSettings:
    """Raises UsageError naming the key."""
    settings = decode_config(extra_config, ConnectorSettings, what="kv_connector_extra_config")
    is_guarded = settings.cluster_key_file is not None or settings.allow_unauthenticated_side_channel
    if not _is_loopback(settings.side_channel_host) and not is_guarded:
        raise UsageError(
            f"kv_connector_extra_config: side_channel_host is {settings.side_channel_host}, which other machines can "
            "reach, and there is no cluster_key_file. Make a key with `kvbaton key new`, give every engine a copy and "
            "its path in cluster_key_file; or keep to loopback; or, on a network where you trust everybody, set "
            "allow_unauthenticated_side_channel to true."
        )
    _check_hosts(settings)
    if num_ranks > 1 and settings.side_channel_port == 0:
        raise UsageError(
            f"kv_connector_extra_config: side_channel_port is 0 but this engine has {num_ranks} ranks, which need "
            f"consecutive ports. Set side_channel_port to the first of {num_ranks} free ones."
        )
    return settings


def _check_hosts(settings: ConnectorSettings) -> None:
    for key, host in (("side_channel_host", settings.side_channel_host), ("advertised_host", settings.peer_host)):
        if not _HOST.fullmatch(host):
            raise UsageError(
                f"kv_connector_extra_config: {key} is {host!r}, which is no address. Give a host, without port."
            )
    if _is_every_address(settings.peer_host):
        raise UsageError(
            f"kv_connector_extra_config: decode engines would be told to call {settings.peer_host}, which is every "
            "address of a machine and none to call. Set advertised_host to the one at which they reach this engine."
        )


_HOST = re.compile(r"[\w.:%*-]+")


def _is_every_address(host: str) -> bool:
    if host == "*":  # ZeroMQ's own word for it
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        pass
    try:
        return socket.inet_aton(host) == bytes(4)  # "0" and "0.0" are read so where names are looked up
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
