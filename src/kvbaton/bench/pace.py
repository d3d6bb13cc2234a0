"""How much load a machine bears, from how long one prefill took there.

Invariant: pure. The slowest stage decides: a rate that keeps the prefill engine of a pair well under full occupation, and
as many requests as fit the time one is willing to watch. Read `workload` for what is made of it.
"""

from __future__ import annotations

from kvbaton.bench.workload import Workload

_OCCUPATION = 0.65
"""Of the prefill engine, were all prompts as long as the one that was timed. Near 1 queues grow without end."""
_MOST_PER_S = 4.0


def paced_workload(
    *,
    prefill_s: float,
    watch_s: float,
    input_tokens: tuple[int, int],
    output_tokens: int,
    num_requests: tuple[int, int],
) -> Workload:
    """A load that a machine sustains which took `prefill_s` for the longest prompt; between so many requests."""
    rate_per_s = min(_OCCUPATION / max(prefill_s, 1e-3), _MOST_PER_S)
    fitting = int(watch_s * rate_per_s)
    least, most = num_requests
    return Workload(
        num_requests=min(max(fitting, least), most),
        rate_per_s=round(rate_per_s, 3),
        min_input_tokens=input_tokens[0],
        max_input_tokens=input_tokens[1],
        output_tokens=output_tokens,
    )
