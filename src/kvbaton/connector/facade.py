"""BatonConnector: vLLM's connector interface, delegated to the scheduler side or the worker side. No logic of its own.

Written against vLLM 0.32 (`KVConnectorBase_V1` with `SupportsHMA`); the only file that changes when that interface does.
One class serves both roles: vLLM makes one object for its scheduler and one in every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pipeline_model_parallel_rank, get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvbaton.connector.caches import describe_caches, refuse_unsupported, windowed_groups
from kvbaton.connector.fence import record_fence
from kvbaton.connector.handover import FailedLoads, RankAddress, StepHandover
from kvbaton.connector.scheduler import SchedulerSide
from kvbaton.connector.settings import read_settings
from kvbaton.connector.stats import BatonPromMetrics, BatonStats
from kvbaton.connector.worker import WorkerSide
from kvbaton.errors import LocalProtocolError, UsageError
from kvbaton.protocol.params import PrefillIdentity
from kvbaton.types import EngineId

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


_GIVEN_UP = {RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED}


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises UsageError for the configuration, Unsupported for the model or the build."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if transfer is None or transfer.engine_id is None:
            raise UsageError("BatonConnector needs --kv-transfer-config with an engine id (vLLM makes one by default).")
        settings = read_settings(transfer.kv_connector_extra_config, num_ranks=parallel.world_size)
        refuse_unsupported(vllm_config, kv_cache_config)
        engine_id = EngineId(transfer.engine_id)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._device: torch.device | None = None
        if role is KVConnectorRole.SCHEDULER:
            identity = PrefillIdentity(
                engine_id=engine_id,
                host=settings.peer_host,
                port=settings.side_channel_port,
                tp_size=parallel.tensor_parallel_size,
                pp_size=parallel.pipeline_parallel_size,
            )
            self._scheduler = SchedulerSide(settings, identity, transfer.kv_role)
        else:
            first_rank = parallel.data_parallel_index * parallel.world_size
            self._worker = WorkerSide(settings, engine_id, rank=_rank_in_engine(parallel), first_rank=first_rank)

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise LocalProtocolError("a scheduler method was called on a worker's connector")
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise LocalProtocolError("a worker method was called on the scheduler's connector")
        return self._worker

    def _step(self) -> StepHandover:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepHandover):
            raise LocalProtocolError(f"metadata of {type(metadata).__name__} reached BatonConnector")
        return metadata

    # -- scheduler side ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler_side.num_expected_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All that take part in transfers: blocks that a load fills must not be zeroed by a step that runs meanwhile."""
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        block_ids = tuple(tuple(group) for group in blocks.get_block_ids())
        self._scheduler_side.blocks_allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> tuple[tuple[int, ...], ...] | None:
            found = None if state is None else state.get_block_ids(request_id)
            return None if found is None else tuple(tuple(group) for group in found)

        return self._scheduler_side.step(scheduler_output, blocks_of)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        windowed = windowed_groups(self._kv_cache_config)
        if windowed:
            depth = self._vllm_config.max_concurrent_batches
            self._scheduler_side.pin_in(kv_cache_manager.block_pool, windowed, depth)

    def has_pending_push_work(self) -> bool:
        # Held blocks need no such hint: vLLM steps on while a finished request is in its books.
        return self._scheduler_side.is_waiting_for_steps

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.sends_ended(connector_output.finished_sending or ())
        self._scheduler_side.loads_ended(connector_output.finished_recving or (), connector_output.failed_recving)
        failed_somewhere = connector_output.kv_connector_worker_meta
        if isinstance(failed_somewhere, FailedLoads):
            self._scheduler_side.loads_failed_somewhere(failed_somewhere.request_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.finished(request, block_ids, is_aborted=request.status in _GIVEN_UP)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        address = metadata[0]
        if not isinstance(address, RankAddress):
            raise LocalProtocolError(f"handshake metadata of {type(address).__name__} reached BatonConnector")
        self._scheduler_side.set_address(address)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata({0: metadata[0, 0]})  # the other ranks' ports follow from rank 0's

    # -- worker side -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout, spans = describe_caches(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            tp_rank=get_tensor_model_parallel_rank(),
            pp_rank=get_pipeline_model_parallel_rank(),
        )
        self._device = next(iter(kv_caches.values())).device
        self._worker_side.register(layout, spans)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker_side.address

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Called first in every step, before the forward: registrations leave while the step computes.
        if isinstance(kv_connector_metadata, StepHandover):
            self._worker_side.submit_before(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads were started in `handle_preemptions`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all loads are asynchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: blocks are sent per step, not per layer."""

    def wait_for_save(self) -> None:
        step = self._step()
        fence = record_fence(self._device) if step.after_forward and self._device is not None else None
        self._worker_side.submit_after(step, fence)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # What `finished_req_ids` says, the step's commands say too, without mistaking a request for an earlier namesake.
        batch = self._worker_side.collect(is_idle_step=self._step().num_scheduled_tokens == 0)
        return KVConnectorTransferResults(
            finished_sending=set(batch.sent), finished_recving=set(batch.received), failed_recving=set(batch.failed)
        )

    def build_connector_worker_meta(self) -> FailedLoads | None:
        failed = self._worker_side.take_failed_loads()
        return FailedLoads(failed) if failed else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    # -- statistics --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """From every worker, in every step; vLLM's scheduler asks its own side as well, which has nothing of its own."""
        return None if self._worker is None else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return BatonStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return BatonPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


def _rank_in_engine(parallel: ParallelConfig) -> int:
    stage, size = get_pipeline_model_parallel_rank(), int(parallel.tensor_parallel_size)
    return int(stage * size + get_tensor_model_parallel_rank())
