"""The tally in vLLM's terms: a container that travels from workers to the front end, and the Prometheus metrics there.

vLLM takes one container per worker and step, adds those of all workers together, and hands the sum as a plain dict to its
loggers. Invariant: amounts are added; gauges are not, they belong to one rank each and the newest counts.
Next: runtime/metrics.py, the table of the metrics.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbaton.runtime import metrics
from kvbaton.runtime.metrics import METRICS, Kind, Metric
from kvbaton.runtime.tally import Snapshot
from kvbaton.types import End, Outcome

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RANK = "rank"
"""Gauges have this label besides the table's: vLLM may have several front ends, and each sees some ranks' news only."""

_MIB = 2**20


def _nothing() -> dict[str, Any]:
    return {"observed": {}, "counted": {}, "gauges": {}}


class BatonStats(KVConnectorStats):
    """`data` holds `observed` (values), `counted` (amounts), each by `Metric.key`, and `gauges` by rank and key."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or _nothing())

    @classmethod
    def of(cls, rank: int, snapshot: Snapshot) -> BatonStats:
        # The rank is text, because the dict crosses to the front end as a message with text for keys.
        gauges = {str(rank): snapshot.gauges} if snapshot.gauges else {}
        return cls({"observed": snapshot.observed, "counted": snapshot.counted, "gauges": gauges})

    def reset(self) -> None:
        self.data: dict[str, Any] = _nothing()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """`other` is of another rank, or of a later step."""
        observed, counted = self.data["observed"], self.data["counted"]
        for key, values in other.data["observed"].items():
            observed.setdefault(key, []).extend(values)
        for key, amount in other.data["counted"].items():
            counted[key] = counted.get(key, 0) + amount
        self.data["gauges"].update(other.data["gauges"])
        return self

    def is_empty(self) -> bool:
        """Nothing happened and nothing waits: not worth a line in the log."""
        return not (self.data["observed"] or self.data["counted"] or self._highest(metrics.WAITING))

    def reduce(self) -> dict[str, int | float]:
        """What an interval's line in vLLM's log says."""
        said: dict[str, int | float] = {
            "Num successful transfers": self._amount(metrics.TRANSFERS, Outcome.DELIVERED),
            "Num failed or cancelled transfers": self._amount(metrics.UNDELIVERED),
            **self._moved(),
            **self._waiting(),
        }
        for name, metric in _TROUBLES.items():
            if amount := self._amount(metric):
                said[name] = amount
        return said

    def _moved(self) -> dict[str, int | float]:
        """Of operations that this engine posted: the prefill engine's writes, the decode engine's reads."""
        move_s, num_bytes = self._values(metrics.XFER_TIME), self._values(metrics.BYTES)
        post_s = self._values(metrics.POST_TIME)
        if not move_s.size or not post_s.size:
            return {}
        said: dict[str, int | float] = {
            "Num segments moved": move_s.size,
            "Avg xfer time (ms)": round(float(move_s.mean()) * 1e3, 3),
            "P90 xfer time (ms)": round(float(np.percentile(move_s, 90)) * 1e3, 3),
            "Avg post time (ms)": round(float(post_s.mean()) * 1e3, 3),
            "P90 post time (ms)": round(float(np.percentile(post_s, 90)) * 1e3, 3),
            "MB moved": round(float(num_bytes.sum()) / _MIB, 3),
            "Throughput (MB/s)": round(float(num_bytes.sum()) / _MIB / max(float(move_s.sum()), 1e-9), 3),
            "Avg number of descriptors": round(float(self._values(metrics.DESCRIPTORS).mean()), 1),
        }
        overlap = self._values(metrics.OVERLAP)
        if overlap.size:
            said["Hidden behind prefill (%)"] = round(float(overlap.mean()) * 100, 1)
        return said

    def _waiting(self) -> dict[str, int | float]:
        said: dict[str, int | float] = {}
        for end, what in ((End.SOURCE, "held for decode"), (End.DESTINATION, "awaiting KV")):
            if self._highest(metrics.WAITING, end):
                said[f"Blocks {what}"] = int(self._highest(metrics.PINNED, end))
                said[f"Oldest {what} (s)"] = round(self._highest(metrics.OLDEST, end), 1)
        return said

    def _values(self, metric: Metric) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(self.data["observed"].get(metric.key(), ()), dtype=np.float64)

    def _amount(self, metric: Metric, *labels: enum.Enum) -> int:
        """Over all series of the metric that carry these labels."""
        return sum(amount for key, amount in self.data["counted"].items() if _matches(key, metric, labels))

    def _highest(self, metric: Metric, *labels: enum.Enum) -> float:
        """Over all ranks: they hold the same requests' blocks, so a sum would count one block several times."""
        found = [
            value
            for gauges in self.data["gauges"].values()
            for key, value in gauges.items()
            if _matches(key, metric, labels)
        ]
        return max(found, default=0.0)


_TROUBLES = {
    "Num failed operations": metrics.FAILED_TRANSFERS,
    "Num KV expired reqs": metrics.EXPIRED,
    "Num refused registrations": metrics.REFUSED,
    "Num dropped messages": metrics.DROPPED,
    "Num transports opened anew": metrics.FENCES,
}


def _matches(key: str, metric: Metric, labels: Iterable[enum.Enum]) -> bool:
    suffix, *values = key.split("|")
    return suffix == metric.suffix and all(metrics.label_value(label) in values for label in labels)


class BatonPromMetrics(KVConnectorPromMetrics):
    """The table's metrics in the front end's registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            metric.suffix: _create(metric, metric_types, [*labelnames, *_own_labels(metric)]) for metric in METRICS
        }
        self._series: dict[tuple[int, str, str], Any] = {}
        parallel = vllm_config.parallel_config
        num_ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        for engine in per_engine_labelvalues:
            self._create_series(engine, num_ranks)

    def _create_series(self, engine: int, num_ranks: int) -> None:
        """All that there can be, at 0: of one that appears with its first event, a rate misses that event."""
        for metric in METRICS:
            for rank in [str(number) for number in range(num_ranks)] if metric.kind is Kind.GAUGE else [""]:
                for key in metric.all_keys():
                    self._one(engine, key, rank)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, values in transfer_stats_data["observed"].items():
            series = self._one(engine_idx, key)
            for value in values:
                series.observe(value)
        for key, amount in transfer_stats_data["counted"].items():
            self._one(engine_idx, key).inc(amount)
        for rank, gauges in transfer_stats_data["gauges"].items():
            for key, value in gauges.items():
                self._one(engine_idx, key, rank).set(value)

    def _one(self, engine: int, key: str, rank: str = "") -> Any:
        """The series of this key."""
        known = self._series.get((engine, key, rank))
        if known is None:
            suffix, *values = key.split("|")
            labels = [*self.per_engine_labelvalues[engine], *values, *([rank] if rank else [])]
            known = self._series[engine, key, rank] = self._metrics[suffix].labels(*labels)
        return known


def _own_labels(metric: Metric) -> list[str]:
    return [*metric.labels, *([RANK] if metric.kind is Kind.GAUGE else [])]


def _create(metric: Metric, types: Mapping[type[Any], type[Any]], labelnames: list[str]) -> Any:
    about = {"name": metric.name, "documentation": metric.meaning, "labelnames": labelnames}
    if metric.kind is Kind.HISTOGRAM:
        return types[Histogram](**about, buckets=list(metric.buckets))
    if metric.kind is Kind.GAUGE:
        return types[Gauge](**about, multiprocess_mode="mostrecent")
    return types[Counter](**about)
