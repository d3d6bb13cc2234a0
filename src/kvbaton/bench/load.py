"""Drives `vllm bench serve` against a URL, in a process of its own, on a leash.

Invariant: nothing of it outlives the call; a run ends with records, or with an error that shows the end of its log.
The file it writes is vLLM's own, so that vLLM's tools read it too. Read `records` for what is taken from it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvbaton.bench.records import RequestRecord, records_from_vllm
from kvbaton.errors import UsageError
from kvbaton.launch.diagnose import diagnose
from kvbaton.launch.machine import this_machine
from kvbaton.launch.plan import ProcessPlan
from kvbaton.launch.process import Child
from kvbaton.launch.ready import last_lines
from kvbaton.launch.remedy import deployment_error

_STOP_S = 5.0
_TQDM = re.compile(r"(\d+)/(\d+) \[")
"""How vLLM's progress bar counts."""
_QUIET = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Random prompts at random moments, the same for the same seed."""

    num_prompts: int
    rate_per_s: float
    input_tokens: int
    output_tokens: int

    def file_name(self, mode: str, iteration: int) -> str:
        """Says which run of what a results file holds."""
        shape = f"qps{self.rate_per_s:g}_in{self.input_tokens}_out{self.output_tokens}"
        return f"{mode}_{shape}_iter{iteration}.json"


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the load generator."""

    load: Load
    seed: int
    url: str
    model: str
    """Also where the tokenizer is."""
    model_name: str
    result_path: Path
    log_path: Path
    metadata: dict[str, str] = {}
    command: tuple[str, ...] | None = None
    """In place of `vllm bench serve`; for tests."""


def bench_argv(run: BenchRun) -> tuple[str, ...]:
    """The command. Its own warm-up is not used: it would send the first measured prompt, and fill prefix caches."""
    load = run.load
    metadata = [f"{name}={value}" for name, value in run.metadata.items()]
    return (
        *(run.command or (this_machine().vllm, "bench", "serve")),
        *("--backend", "openai", "--base-url", run.url, "--endpoint", "/v1/completions"),
        *("--model", run.model, "--served-model-name", run.model_name),
        *("--dataset-name", "random", "--seed", str(run.seed), "--num-prompts", str(load.num_prompts)),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--request-rate", f"{load.rate_per_s:g}", "--ignore-eos"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(run.result_path.parent), "--result-filename", run.result_path.name),
        *(("--metadata", *metadata) if metadata else ()),
    )


def run_bench(
    run: BenchRun,
    *,
    attend: Callable[[Callable[[], bool]], None],
    deadline_s: float,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[RequestRecord, ...]:
    """One record per request. DeploymentError when it failed or took longer than `deadline_s`.

    `attend` waits until its argument is true; what it raises ends the run.
    """
    run.result_path.parent.mkdir(parents=True, exist_ok=True)
    # What an earlier run left must not pass for the result of this one.
    run.result_path.unlink(missing_ok=True)
    give_up_at_s = time.monotonic() + deadline_s
    child = Child(_plan(run))
    try:
        attend(lambda: _is_over(child, run, give_up_at_s, on_progress))
        code = child.exit_code()
    finally:
        child.stop(_STOP_S)
    found = diagnose(str(run.log_path), code)
    if code is None:
        raise deployment_error(f"not finished after {deadline_s:.0f} s\n{found.text()}", "Raise --deadline.")
    if code != 0 or not run.result_path.is_file():
        raise deployment_error(f"`vllm bench serve` {found.how}\n{found.text()}", f"Read the whole log: {run.log_path}")
    return _records(run)


def _records(run: BenchRun) -> tuple[RequestRecord, ...]:
    try:
        records = records_from_vllm(run.result_path.read_bytes(), output_tokens=run.load.output_tokens)
    except UsageError as error:
        raise deployment_error(
            f"{run.result_path}: {error}", "This version of vLLM writes other results than the one kvbaton knows."
        ) from None
    if len(records) != run.load.num_prompts:
        raise deployment_error(
            f"{run.result_path} has {len(records)} requests of {run.load.num_prompts}",
            f"Read the whole log: {run.log_path}",
        )
    return records


def _is_over(child: Child, run: BenchRun, give_up_at_s: float, on_progress: Callable[[str], None]) -> bool:
    counts = _TQDM.findall("\n".join(last_lines(str(run.log_path), 3)))
    on_progress(f"{counts[-1][0]} of {counts[-1][1]} answered" if counts else "the load generator starts")
    return child.exit_code() is not None or time.monotonic() > give_up_at_s


def _plan(run: BenchRun) -> ProcessPlan:
    parts = urlsplit(run.url)
    return ProcessPlan(
        name="bench",
        role="bench",
        host=parts.hostname or "",
        port=parts.port or 0,
        argv=bench_argv(run),
        # It waits more than it computes; on few cores its threads would be the engines' rivals.
        env=_QUIET | ({"HF_HUB_OFFLINE": "1"} if Path(run.model).is_dir() else {}),
        log_path=str(run.log_path),
    )
