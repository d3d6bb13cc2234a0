"""Whether an engine has all its blocks back, asked of vLLM itself.

Invariant: two witnesses, and both must agree: the share of blocks in use is 0, and the prefix cache can be emptied, which
vLLM refuses while anybody holds a block, a request that ended long ago included.
"""

from __future__ import annotations

import json
import time

from kvbaton.bench.soak_report import PoolRecord
from kvbaton.launch.ready import ask
from kvbaton.launch.supervisor import Instance

_EVERY_S = 0.2
_ANSWER_S = 10.0


def wait_for(instance: Instance, timeout_s: float) -> PoolRecord:
    """How long it took until nothing was held, or that it did not within `timeout_s`."""
    began_s = time.monotonic()
    usage = _usage(instance)
    while usage > 0 and time.monotonic() < began_s + timeout_s:
        time.sleep(_EVERY_S)
        usage = _usage(instance)
    empty_after_s = round(time.monotonic() - began_s, 1) if usage == 0 else None
    return PoolRecord(
        engine=instance.name,
        usage=usage,
        empty_after_s=empty_after_s,
        is_cache_reset=_reset(instance),
        num_preemptions=metric(instance, "vllm:num_preemptions_total") or 0.0,
    )


def metric(instance: Instance, name: str) -> float | None:
    """The sum of a metric's samples; None when the engine does not answer or has none."""
    answer = ask(instance.plan.connect_host, instance.plan.port, "/metrics", timeout_s=_ANSWER_S)
    if answer is None or not answer.ok:
        return None
    lines = answer.body.decode(errors="replace").splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(found) if found else None


def _usage(instance: Instance) -> float:
    """1 where it is not known: an engine that does not answer has not given anything back."""
    usage = metric(instance, "vllm:kv_cache_usage_perc")
    return 1.0 if usage is None else usage


def _reset(instance: Instance) -> bool:
    answer = ask(instance.plan.connect_host, instance.plan.port, "/reset_prefix_cache", body={}, timeout_s=_ANSWER_S)
    return answer is not None and answer.ok and json.loads(answer.body or b"{}").get("success") is True
