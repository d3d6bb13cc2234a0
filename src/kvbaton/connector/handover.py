"""What the scheduler side hands to the worker side each step, and what a worker tells the scheduler once."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvbaton.runtime.events import Command
from kvbaton.types import RequestId, TransferId


@dataclass
class StepHandover(KVConnectorMetadata):
    """`before_forward` may go to the driver at once; `after_forward` speaks of KV that this step computes."""

    before_forward: list[Command] = field(default_factory=list)
    after_forward: list[Command] = field(default_factory=list)
    preempted: list[tuple[TransferId, RequestId]] = field(default_factory=list)
    """Prefill requests whose blocks this step may overwrite."""
    rejected: dict[RequestId, str] = field(default_factory=dict)
    """Decode requests whose params are invalid: to be failed without a transfer."""
    num_scheduled_tokens: int = 0


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):
    """Where a rank's side channel listens."""

    host: str
    port: int
