"""The tally on its way: from workers through vLLM's aggregation to its log line and to Prometheus."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvbaton.connector.stats import BatonPromMetrics, BatonStats
from kvbaton.runtime import metrics
from kvbaton.runtime.metrics import METRICS, Channel, Kind, Way, Why
from kvbaton.runtime.tally import Tally
from kvbaton.types import End, Outcome

DELIVERED = (End.SOURCE, Way.PUSH, Outcome.DELIVERED)


def moved(tally: Tally, num_segments: int, move_s: float = 0.01) -> None:
    for _ in range(num_segments):
        tally.observe(metrics.XFER_TIME, move_s)
        tally.observe(metrics.POST_TIME, 0.002)
        tally.observe(metrics.BYTES, 2 << 20)
        tally.observe(metrics.DESCRIPTORS, 16)
    tally.observe(metrics.OVERLAP, 0.75)
    tally.count(metrics.TRANSFERS, *DELIVERED)


def stats_of(tally: Tally, rank: int = 0, now_s: float = 100.0) -> BatonStats:
    snapshot = tally.take(now_s)
    assert snapshot is not None
    return BatonStats.of(rank, snapshot)


def sent(stats: BatonStats) -> BatonStats:
    """As it arrives in another process: workers pickle it, the front end gets its dict as a message."""
    unpickled = pickle.loads(pickle.dumps(stats))
    return BatonStats(msgspec.msgpack.decode(msgspec.msgpack.encode(unpickled.to_dict())))


def test_a_step_of_two_ranks_adds_amounts_and_keeps_each_ranks_gauges() -> None:
    ranks = [Tally(), Tally()]
    for number, tally in enumerate(ranks):
        moved(tally, 2)
        tally.wait_begins(End.SOURCE, "t", 30 + number, 90.0)
    whole = sent(stats_of(ranks[0])).aggregate(sent(stats_of(ranks[1], rank=1)))
    assert whole.data["counted"] == {metrics.TRANSFERS.key(*DELIVERED): 2}
    assert len(whole.data["observed"][metrics.XFER_TIME.key()]) == 4
    assert {rank: gauges["pinned_blocks|prefill"] for rank, gauges in whole.data["gauges"].items()} == {
        "0": 30,
        "1": 31,
    }


def test_a_later_step_replaces_gauges() -> None:
    tally = Tally()
    tally.wait_begins(End.DESTINATION, "d", 8, 90.0)
    whole = stats_of(tally)
    assert whole.reduce()["Blocks awaiting KV"] == 8
    tally.wait_ends(End.DESTINATION, "d")
    assert "Blocks awaiting KV" not in whole.aggregate(stats_of(tally)).reduce()


def test_the_log_line_says_what_was_moved_what_waits_and_what_went_wrong() -> None:
    tally = Tally()
    moved(tally, 3)
    tally.count(metrics.TRANSFERS, End.SOURCE, Way.UNKNOWN, Outcome.EXPIRED)
    tally.count(metrics.UNDELIVERED, End.SOURCE, Outcome.EXPIRED, Why.NOBODY_CAME)
    tally.count(metrics.EXPIRED)
    tally.wait_begins(End.SOURCE, "t", 37, 92.5)
    assert sent(stats_of(tally)).reduce() == {
        "Num successful transfers": 1,
        "Num failed or cancelled transfers": 1,
        "Num segments moved": 3,
        "Avg xfer time (ms)": 10.0,
        "P90 xfer time (ms)": 10.0,
        "Avg post time (ms)": 2.0,
        "P90 post time (ms)": 2.0,
        "MB moved": 6.0,
        "Throughput (MB/s)": 200.0,
        "Avg number of descriptors": 16.0,
        "Hidden behind prefill (%)": 75.0,
        "Blocks held for decode": 37,
        "Oldest held for decode (s)": 7.5,
        "Num KV expired reqs": 1,
    }


def test_only_idle_gauges_are_not_worth_a_line() -> None:
    assert stats_of(Tally()).is_empty()
    assert BatonStats().is_empty()
    waiting = Tally()
    waiting.wait_begins(End.SOURCE, "t", 1, 99.0)
    assert not stats_of(waiting).is_empty()
    counted = stats_of(counted_once())
    assert not counted.is_empty()
    counted.reset()
    assert counted.is_empty()


def counted_once() -> Tally:
    tally = Tally()
    tally.count(metrics.DROPPED, Channel.TRANSPORT)
    return tally


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


class Parallel:
    tensor_parallel_size = 2
    pipeline_parallel_size = 1


class Config:
    kv_transfer_config = None
    parallel_config = Parallel()


def prom(registry: CollectorRegistry) -> BatonPromMetrics:
    def into(kind: type[Any]) -> Any:
        return lambda **about: kind(**about, registry=registry)

    types = {kind: into(kind) for kind in (Gauge, Counter, Histogram)}
    return BatonPromMetrics(Config(), types, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})


def test_every_metric_of_the_table_is_there_and_labels_are_the_tables(registry: CollectorRegistry) -> None:
    made = prom(registry)
    tally = Tally()
    moved(tally, 2)
    tally.observe(metrics.SEGMENTS, 2)
    tally.count(metrics.UNDELIVERED, End.SOURCE, Outcome.EXPIRED, Why.NOBODY_CAME)
    tally.count(metrics.REFUSED, Why.OVER)
    tally.count(metrics.DROPPED, Channel.SIDE_CHANNEL)
    tally.wait_begins(End.SOURCE, "t", 37, 92.5)
    made.observe(sent(stats_of(tally)).to_dict(), 1)
    text = generate_latest(registry).decode()
    for metric in METRICS:
        assert f"# TYPE {metric.shown_name} {metric.kind.value}\n" in text, metric.suffix
        assert f"\n{metric.shown_name}" in text, metric.suffix
    at = 'model_name="tiny"'
    assert f'vllm:kvbaton_xfer_time_seconds_count{{engine="1",{at}}} 2.0' in text
    assert f'vllm:kvbaton_xfer_time_seconds_count{{engine="0",{at}}} 0.0' in text
    assert f'vllm:kvbaton_pinned_blocks{{end="prefill",engine="1",{at},rank="0"}} 37.0' in text
    assert f'vllm:kvbaton_oldest_wait_seconds{{end="prefill",engine="1",{at},rank="0"}} 7.5' in text
    assert (
        f'vllm:kvbaton_transfers_total{{direction="push",end="prefill",engine="1",{at},outcome="delivered"}} 1.0'
        in text
    )
    undelivered = f'{{end="prefill",engine="1",{at},outcome="expired",reason="nobody_came"}} 1.0'
    assert f"vllm:kvbaton_transfers_undelivered_total{undelivered}" in text


def test_every_series_is_there_at_nothing_before_anything_happens(registry: CollectorRegistry) -> None:
    made = prom(registry)
    before = {
        (sample.name, *sorted(sample.labels.items())) for family in registry.collect() for sample in family.samples
    }
    for engine in ("0", "1"):
        at = {"model_name": "tiny", "engine": engine}
        for value in (
            registry.get_sample_value("vllm:kvbaton_registrations_refused_total", at | {"reason": "over"}),
            registry.get_sample_value("vllm:kvbaton_fences_total", at | {"reason": "silent_writer"}),
            registry.get_sample_value(
                "vllm:kvbaton_transfers_total", at | {"end": "decode", "direction": "pull", "outcome": "expired"}
            ),
            registry.get_sample_value("vllm:kvbaton_peers", at | {"end": "decode", "state": "connected", "rank": "1"}),
        ):
            assert value == 0.0
    tally = Tally()
    for metric in METRICS:
        for values in itertools.product(*metric.label_values().values()):
            if metric.kind is Kind.COUNTER:
                tally.count(metric, *values)
            elif metric.kind is Kind.HISTOGRAM:
                tally.observe(metric, 1.0)
    for rank in (0, 1):
        made.observe(stats_of(tally if rank else Tally(), rank).to_dict())
    after = {
        (sample.name, *sorted(sample.labels.items())) for family in registry.collect() for sample in family.samples
    }
    assert after == before


def test_what_cannot_be_has_no_series(registry: CollectorRegistry) -> None:
    prom(registry)
    text = generate_latest(registry).decode()
    assert "vllm:kvbaton_transfers_undelivered_total{" in text
    assert not [line for line in text.splitlines() if "undelivered" in line and 'outcome="delivered"' in line]
    with pytest.raises(AssertionError, match="transfers_undelivered"):
        Tally().count(metrics.UNDELIVERED, End.SOURCE, Outcome.DELIVERED, Why.OTHER)


def test_a_gauge_that_returns_to_nothing_is_shown_as_nothing(registry: CollectorRegistry) -> None:
    made, tally = prom(registry), Tally()
    tally.wait_begins(End.SOURCE, "t", 37, 92.5)
    made.observe(stats_of(tally).to_dict())
    tally.wait_ends(End.SOURCE, "t")
    made.observe(stats_of(tally).to_dict())
    labels = {"model_name": "tiny", "engine": "0", "end": "prefill", "rank": "0"}
    for metric in (metrics.PINNED, metrics.WAITING, metrics.OLDEST):
        assert registry.get_sample_value(metric.name, labels) == 0.0
