"""What the scheduler side hands to the worker side each step, and what a worker tells the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvbaton.errors import LocalProtocolError
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
class FailedLoads(KVConnectorWorkerMetadata):
    """Loads that failed on a rank. vLLM tells its scheduler of them when all ranks are done; the others need not go on."""

    request_ids: frozenset[RequestId]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FailedLoads:
        if not isinstance(other, FailedLoads):
            raise LocalProtocolError(f"worker metadata of {type(other).__name__} reached BatonConnector")
        return FailedLoads(self.request_ids | other.request_ids)


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):
    """Where a rank's side channel listens."""

    host: str
    port: int
