"""One deployment under the demo's small load: warm-up, the run, and what it cost.

Invariant: a failed request is in the report, never an exception; a dead engine or Ctrl-C is an exception, from
`Deployment.attend`. Read `client` for how requests are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvbaton.bench import surroundings
from kvbaton.bench.client import run_load
from kvbaton.bench.metrics import figures_of
from kvbaton.bench.records import RequestRecord, RunReport
from kvbaton.bench.workload import PlannedRequest
from kvbaton.launch.progress import Progress, Row
from kvbaton.launch.remedy import deployment_error
from kvbaton.launch.supervisor import Deployment

_GRACE_S = 60.0
"""After the last arrival; more than that is no answer to anybody."""
_SHOWN_FAILURES = 3


class Trial:
    """`url` is the deployment's router, or another one in front of its engines."""

    def __init__(self, deployment: Deployment, url: str, title: str, progress: Progress) -> None:
        self._deployment = deployment
        self._url = url
        self._title = title
        self._progress = progress

    def warm_up(self, planned: Sequence[PlannedRequest]) -> float:
        """The time to the first token of the last of `planned`, each sent alone. DeploymentError when one fails."""
        ttft_s = 0.0
        for each in planned:
            record = self._send([each], deadline_s=_GRACE_S * 2)[0]
            if record.failure is not None:
                raise deployment_error(
                    f"a warm-up request through {self._url} failed: {record.failure}",
                    f"Read {self._deployment.router.log_path} and the engines' logs beside it.",
                )
            ttft_s = record.ttft_s or 0.0
        return ttft_s

    def run(self, planned: Sequence[PlannedRequest], seed: int) -> RunReport:
        """How the deployment bore it."""
        self.warm_up([_first_of(planned)])
        cpu_before_s = surroundings.cpu_s(self._deployment.instances)
        records = self._send(planned, deadline_s=planned[-1].due_s + _GRACE_S)
        cpu_s = surroundings.cpu_s(self._deployment.instances) - cpu_before_s
        figures = figures_of(records)
        return RunReport(
            iteration=0, seed=seed, figures=figures, failure=failures_text(records), engine_cpu_s=round(cpu_s, 2)
        )

    def _send(self, planned: Sequence[PlannedRequest], deadline_s: float) -> tuple[RequestRecord, ...]:
        started_s = time.monotonic()
        finished = 0

        def watch(over: Callable[[], bool]) -> bool:
            is_over = over()
            stage = f"{finished} of {len(planned)} answered"
            row = Row(self._title, "", stage, time.monotonic() - started_s, ready=False)
            if len(planned) > 1 and not is_over:
                self._progress.update([row])
            return is_over

        def note(count: int) -> None:
            nonlocal finished
            finished = count

        try:
            return run_load(
                self._url,
                self._deployment.model_name,
                planned,
                attend=lambda over: self._deployment.attend(lambda: watch(over)),
                deadline_s=deadline_s,
                on_finished=note,
            )
        finally:
            self._progress.done()


def failures_text(records: Sequence[RequestRecord]) -> str | None:
    """Why requests failed, the first few reasons; None when none did."""
    found = list(dict.fromkeys(failure for record in records if (failure := record.failure) is not None))
    if not found:
        return None
    more = f"; {len(found) - _SHOWN_FAILURES} more reasons" if len(found) > _SHOWN_FAILURES else ""
    return "; ".join(found[:_SHOWN_FAILURES]) + more


def _first_of(planned: Sequence[PlannedRequest]) -> PlannedRequest:
    """As long as the first, of other tokens: what warms up must not be what is measured."""
    first = planned[0]
    return PlannedRequest(due_s=0.0, prompt_token_ids=first.prompt_token_ids[::-1], output_tokens=2)
