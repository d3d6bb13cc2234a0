"""vLLM's own scheduler with our connector in it, and a worker whose every report is made by hand.

No engine process and no forward pass: `schedule` is what the engine core does before a step and `land` what it does after;
with async scheduling, as on GPUs, a test may schedule a step before the one before it has landed. The hand-made worker
refuses to report what a real one could not, and `check_empty` states what must hold after every story.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvbaton.connector.handover import RankAddress, StepHandover
from kvbaton.connector.scheduler import Role
from kvbaton.launch.models import resolve_model
from kvbaton.runtime.events import Command, DestinationCancelled, DestinationOpened, SourceFinished

BLOCK_SIZE = 4
CHUNK_TOKENS = 16
MAX_STEPS = 400
STOP_TOKEN = 7
TOKEN = 8

Policy = Literal["recompute", "fail"]
Kind = TypeVar("Kind")


@functools.cache
def base_config() -> VllmConfig:
    model = ModelConfig(model=resolve_model("tiny"), dtype="float32", max_model_len=256, seed=0)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=CHUNK_TOKENS, max_model_len=256, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="BatonConnector", kv_connector_module_path="kvbaton.connector", kv_role="kv_both"
        ),
    )


def make_config(num_blocks: int, policy: Policy, role: Role, *, is_async: bool) -> VllmConfig:
    config = copy.copy(base_config())
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = is_async  # the CPU platform turns it off; GPUs have it on
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_load_failure_policy = policy
    config.kv_transfer_config.kv_role = role
    return config


def cache_groups(window_tokens: int) -> list[KVCacheGroupSpec]:
    shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if window_tokens:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=window_tokens)))
    return groups


@dataclass
class Step:
    output: SchedulerOutput
    samples: set[str]
    """Requests of which this step computes the last known token, and so samples the next."""


@dataclass
class Worker:
    """What the real one would know: whatever it reports, it reports once, and somebody waits for it."""

    loading: dict[str, DestinationOpened] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    news: KVConnectorOutput = field(default_factory=KVConnectorOutput)

    def obey(self, step: StepHandover) -> None:
        for command in step.before_forward:
            if isinstance(command, DestinationOpened):
                self.loading[command.request_id] = command
            elif isinstance(command, DestinationCancelled) and command.request_id in self.loading:
                self.fail(command.request_id)
        for request_id in step.rejected:
            self._received(request_id, is_failed=True)
        self.held |= {
            each.request_id for each in step.after_forward if isinstance(each, SourceFinished) and each.is_held
        }

    def deliver(self, request_id: str) -> None:
        del self.loading[request_id]
        self._received(request_id, is_failed=False)

    def fail(self, request_id: str) -> None:
        del self.loading[request_id]
        self._received(request_id, is_failed=True)

    def _received(self, request_id: str, *, is_failed: bool) -> None:
        self.news.finished_recving = (self.news.finished_recving or set()) | {request_id}
        if is_failed:
            self.news.failed_recving = self.news.failed_recving | {request_id}

    def release(self, request_id: str) -> None:
        self.held.remove(request_id)
        self.news.finished_sending = (self.news.finished_sending or set()) | {request_id}

    def take(self) -> KVConnectorOutput:
        news, self.news = self.news, KVConnectorOutput()
        return news


class Engine:
    def __init__(
        self,
        num_blocks: int = 20,
        *,
        policy: Policy = "fail",
        role: Role = "kv_both",
        is_async: bool = False,
        window_tokens: int = 0,
    ) -> None:
        config = make_config(num_blocks, policy, role, is_async=is_async)
        init_none_hash(sha256)
        self.scheduler: Scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], cache_groups(window_tokens)),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        assert self.scheduler.connector is not None
        self.scheduler.connector.set_xfer_handshake_metadata({0: RankAddress("127.0.0.1", 5555)})
        self.worker = Worker()
        self.in_flight: deque[Step] = deque()
        self.handovers: list[StepHandover] = []
        self.preempted: list[str] = []
        self.outputs: list[EngineCoreOutput] = []
        self.num_free_at_first = self.num_free
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    @property
    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def commands(self) -> list[Command]:
        """Everything said to the worker so far."""
        return [each for step in self.handovers for each in (*step.before_forward, *step.after_forward)]

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.scheduler.kv_cache_manager.get_block_ids(request_id)))

    def add(
        self,
        request_id: str,
        prompt: int | list[int],
        params: dict[str, object] | None = None,
        *,
        max_tokens: int = 1,
        prompt_logprobs: int | None = None,
    ) -> Request:
        """`prompt` is its tokens, or the number of tokens of a prompt that shares nothing with others."""
        if isinstance(prompt, int):
            prompt = [sum(map(ord, request_id)) * 1000 + each for each in range(prompt)]
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[STOP_TOKEN],
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        request = Request(request_id, prompt, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def preempt_all(self) -> None:
        """vLLM's way to preempt whatever runs."""
        if not self.in_flight:
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            return
        with pytest.raises(
            RuntimeError, match="reset KV cache"
        ):  # raised after the preemption: a step holds the blocks
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def schedule(self) -> StepHandover:
        before = {request_id: request.num_computed_tokens for request_id, request in self.scheduler.requests.items()}
        output = self.scheduler.schedule()
        computed = before | {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        samples = {
            request_id
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if computed[request_id] + num_tokens >= self.scheduler.requests[request_id].num_tokens
        }
        handover = output.kv_connector_metadata
        assert isinstance(handover, StepHandover)
        self.in_flight.append(Step(output, samples))
        self.handovers.append(handover)
        self.preempted += output.preempted_req_ids or ()
        return handover

    def land(self, **sampled: int) -> list[EngineCoreOutput]:
        """The oldest step in flight has been executed. `sampled` names other tokens than the usual."""
        step = self.in_flight.popleft()
        assert isinstance(step.output.kv_connector_metadata, StepHandover)
        self.worker.obey(step.output.kv_connector_metadata)
        request_ids = list(step.output.num_scheduled_tokens)
        runner_output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[sampled.get(each, TOKEN)] if each in step.samples else [] for each in request_ids],
            kv_connector_output=self.worker.take(),
        )
        by_client = self.scheduler.update_from_output(step.output, runner_output)
        outputs = [each for client in by_client.values() for each in client.outputs]
        self.outputs += outputs
        return outputs

    def step(self, **sampled: int) -> StepHandover:
        """Schedules a step and lands all that are in flight."""
        handover = self.schedule()
        while self.in_flight:
            self.land(**sampled)
        return handover

    def tick(self) -> None:
        """As the engine core does: with async scheduling a step is scheduled before the one before it has landed."""
        is_executing = False
        if self.scheduler.has_requests():
            is_executing = self.schedule().num_scheduled_tokens > 0
        depth = self.scheduler.vllm_config.max_concurrent_batches
        if len(self.in_flight) < depth and (is_executing or self.scheduler.has_requests()):
            return
        if self.in_flight:
            self.land()

    def run(self) -> None:
        """Until the engine core would go to sleep, with a worker that delivers and releases whatever it can."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            for request_id in list(self.worker.loading):
                self.worker.deliver(request_id)
            for request_id in list(self.worker.held):
                self.worker.release(request_id)
            self.tick()
        raise AssertionError("the scheduler never comes to rest")

    def finish_reason(self, request_id: str) -> str | None:
        """How the answer ended, as its client sees it; None while it has not."""
        last = self._last_output(request_id)
        return None if last is None else str(last.finish_reason)

    def answer(self, request_id: str) -> dict[str, object] | None:
        """The `kv_transfer_params` of a finished request."""
        last = self._last_output(request_id)
        assert last is not None
        params: dict[str, object] | None = last.kv_transfer_params
        return params

    def _last_output(self, request_id: str) -> EngineCoreOutput | None:
        own = [each for each in self.outputs if each.request_id == request_id and each.finish_reason is not None]
        assert len(own) <= 1
        return own[0] if own else None

    def num_tokens(self, request_id: str) -> int:
        return sum(len(each.new_token_ids) for each in self.outputs if each.request_id == request_id)

    def check_empty(self) -> None:
        """Nothing is left of any request: not a block, not a word in the connector, nothing to step for."""
        assert not self.scheduler.has_requests()
        assert not self.worker.loading
        assert not self.worker.held
        side = self.scheduler.connector._scheduler_side
        assert not side._requests
        assert len(side._shared) == 0
        assert side._handover == StepHandover()
        assert side._pins is None or len(side._pins) == 0
        assert self.num_free == self.num_free_at_first
        assert self.scheduler.reset_prefix_cache()


def of_type(kind: type[Kind], commands: Iterable[object]) -> list[Kind]:
    return [each for each in commands if isinstance(each, kind)]
