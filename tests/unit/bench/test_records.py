"""Records and results files: what counts as failed, and that nothing malformed is read."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvbaton.bench.records import Environment, ModeReport, Report, RequestRecord, RunReport, records_from_vllm
from kvbaton.errors import UsageError


def record(**fields: object) -> RequestRecord:
    values: dict[str, object] = {
        "sent_s": 0.0,
        "ttft_s": 0.2,
        "itls_s": (0.1, 0.1),
        "latency_s": 0.4,
        "input_tokens": 10,
        "output_tokens": 3,
        "expected_output_tokens": 3,
    }
    return RequestRecord(**(values | fields))  # type: ignore[arg-type]


class TestFailure:
    def test_all_tokens_are_a_success(self) -> None:
        assert record().failure is None

    def test_a_stream_that_was_cut_is_a_failure(self) -> None:
        assert record(output_tokens=2).failure == "2 of 3 tokens came"

    def test_no_token_is_a_failure(self) -> None:
        assert record(ttft_s=None).failure == "no token came"

    def test_an_error_says_itself(self) -> None:
        assert record(error="status 503").failure == "status 503"


def detailed(**fields: object) -> bytes:
    values: dict[str, object] = {
        "date": "20261130-210000",
        "completed": 2,
        "failed": 1,
        "mean_ttft_ms": 250.0,
        "input_lens": [500, 501, 500],
        "output_lens": [3, 2, 0],
        "ttfts": [0.2, 0.3, 0.0],
        "itls": [[0.1, 0.1], [0.2], []],
        "latencies": [0.4, 0.5, 0.0],
        "start_times": [100.0, 101.0, 102.5],
        "generated_texts": ["a b c", "a b", ""],
        "errors": ["", "", "Bad Gateway"],
    }
    return json.dumps(values | fields).encode()


class TestRecordsFromVllm:
    def test_every_request_becomes_a_record(self) -> None:
        good, cut, failed = records_from_vllm(detailed(), output_tokens=3)
        assert good == record(sent_s=0.0, input_tokens=500)
        assert cut.sent_s == 1.0
        assert cut.failure == "2 of 3 tokens came"
        assert failed.ttft_s is None
        assert failed.failure == "Bad Gateway"

    def test_no_request_is_no_record(self) -> None:
        lists = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")
        assert records_from_vllm(detailed(**{name: [] for name in lists}), output_tokens=3) == ()

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"{}",
            b"[]",
            b'"\xff"',
            detailed(ttfts=[0.1]),
            detailed(ttfts=["a", "b", "c"]),
            detailed(itls=[0.1, 0.2, 0.3]),
            detailed(errors=None),
        ],
    )
    def test_anything_else_is_refused(self, data: bytes) -> None:
        with pytest.raises(UsageError, match="not a detailed result of `vllm bench serve`"):
            records_from_vllm(data, output_tokens=3)


def report() -> Report:
    run = RunReport(iteration=0, seed=1, figures=None, failure="not finished after 240 s")
    return Report(
        kind="compare",
        model="/models/tiny",
        workload={"num_prompts": 20, "rate_per_s": 1.0, "dtype": "bfloat16"},
        environment=Environment(
            date="2026-11-30", command="kvbaton bench", machine="x", num_cores=2, versions={"vllm": "0.32.0"}
        ),
        modes=(
            ModeReport(name="a", title="A", cores="2", is_hand_edited=False, commands=("vllm serve",), runs=(run,)),
        ),
    )


class TestReport:
    def test_it_survives_being_written(self) -> None:
        assert Report.decode(report().encode()) == report()

    @pytest.mark.parametrize(
        "change", [{"schema_version": 2}, {"kind": "other"}, {"extra": 1}, {"modes": [{"name": "a"}]}, {"model": None}]
    )
    def test_another_schema_is_refused(self, change: dict[str, object]) -> None:
        values = msgspec.json.decode(report().encode(), type=dict[str, object])
        with pytest.raises(UsageError, match="not a results file of this version"):
            Report.decode(json.dumps(values | change).encode())

    def test_half_a_file_is_refused(self) -> None:
        with pytest.raises(UsageError, match="not a results file"):
            Report.decode(report().encode()[:100])
        with pytest.raises(UsageError, match="not a results file"):
            Report.decode(b'{"kind": "\xff"}')
