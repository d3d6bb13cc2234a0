"""What the scheduler side looks at in vLLM's objects, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, object] | None


@dataclass
class FakeNew:
    req_id: str
    num_computed_tokens: int


@dataclass
class FakeCached:
    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class FakeOutput:
    scheduled_new_reqs: list[FakeNew] = field(default_factory=list)
    scheduled_cached_reqs: FakeCached = field(default_factory=FakeCached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def request(request_id: str, num_prompt_tokens: int, **params: object) -> Request:
    return cast("Request", FakeRequest(request_id, num_prompt_tokens, params or None))


def output(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    preempted: set[str] | None = None,
) -> SchedulerOutput:
    """Per request: (tokens computed before this step, tokens scheduled in it)."""
    new, cached = new or {}, cached or {}
    made = FakeOutput(
        [FakeNew(request_id, computed) for request_id, (computed, _) in new.items()],
        FakeCached(list(cached), [computed for computed, _ in cached.values()]),
        {request_id: scheduled for request_id, (_, scheduled) in (new | cached).items()},
        preempted,
    )
    return cast("SchedulerOutput", made)
