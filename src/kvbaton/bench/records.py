"""One frozen record per request, and the schema of every results file.

Invariant: pure, and strict: a file with a missing, unknown or mistyped field is refused, never guessed at. A request that
ended early counts as failed, whatever its HTTP status was. Read `metrics` for the figures made of records.
"""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from kvbaton.errors import UsageError


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client saw of one request. Times count from the moment it was sent, `sent_s` from the run's start."""

    sent_s: float
    ttft_s: float | None
    """None when no token came."""
    itls_s: tuple[float, ...]
    """Between one piece of the stream and the next."""
    latency_s: float
    """Until the last token."""
    input_tokens: int
    output_tokens: int
    expected_output_tokens: int
    error: str | None = None

    @property
    def failure(self) -> str | None:
        """Why this request did not give what was asked for; None when it did."""
        if self.error is not None:
            return self.error
        if self.ttft_s is None:
            return "no token came"
        if self.output_tokens < self.expected_output_tokens:
            return f"{self.output_tokens} of {self.expected_output_tokens} tokens came"
        return None


class Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure over many requests, named as `vllm bench serve` names them."""

    mean: float
    median: float
    std: float
    p50: float
    p90: float
    p99: float


class RunFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run in numbers. None where no request gave one."""

    completed: int
    failed: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None


class RunReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mode, once. `failure` says why there are no figures, or which requests failed."""

    iteration: int
    seed: int
    figures: RunFigures | None
    failure: str | None = None
    results_file: str | None = None
    engine_cpu_s: float | None = None
    """Processor time of all engines during the run."""


class ModeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way of serving, with all its runs and the commands that started it."""

    name: str
    title: str
    cores: str
    is_hand_edited: bool
    commands: tuple[str, ...]
    runs: tuple[RunReport, ...]


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and with what the figures were made."""

    date: str
    command: str
    machine: str
    num_cores: int
    versions: dict[str, str]
    load_at_start: float | None = None
    """The machine's run queue over the last minute before anything was started."""


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole results file."""

    schema_version: Literal[1] = 1
    kind: Literal["demo", "compare"]
    model: str
    workload: dict[str, str | int | float]
    environment: Environment
    modes: tuple[ModeReport, ...]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises UsageError for anything but a report of this version."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"not a results file of this version: {error}") from None


class _Detailed(msgspec.Struct, frozen=True, kw_only=True):
    """What `vllm bench serve --save-detailed` writes of each request; its own sums and settings are not needed."""

    completed: int
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    ttfts: tuple[float, ...]
    itls: tuple[tuple[float, ...], ...]
    latencies: tuple[float, ...]
    start_times: tuple[float, ...]
    errors: tuple[str | None, ...]


def records_from_vllm(data: bytes, *, output_tokens: int) -> tuple[RequestRecord, ...]:
    """The requests in a detailed result of `vllm bench serve` that asked for `output_tokens` each.

    vLLM counts a stream that was cut after its first token as completed; its record here says that it failed.
    Raises UsageError for a file without details, or with lists of different lengths.
    """
    try:
        detailed = msgspec.json.decode(data, type=_Detailed)
        rows = list(
            zip(
                detailed.start_times,
                detailed.ttfts,
                detailed.itls,
                detailed.latencies,
                detailed.input_lens,
                detailed.output_lens,
                detailed.errors,
                strict=True,
            )
        )
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"not a detailed result of `vllm bench serve`: {error}") from None
    first_s = min(detailed.start_times, default=0.0)
    return tuple(
        RequestRecord(
            sent_s=start_s - first_s,
            # vLLM's zero: a first token cannot come in no time.
            ttft_s=ttft_s or None,
            itls_s=itls_s,
            latency_s=latency_s,
            input_tokens=input_tokens,
            output_tokens=num_output,
            expected_output_tokens=output_tokens,
            error=error or None,
        )
        for start_s, ttft_s, itls_s, latency_s, input_tokens, num_output, error in rows
    )
