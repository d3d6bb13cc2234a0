"""What is counted is taken once, gauges are told when they change, long waits are named once per threshold."""

from __future__ import annotations

import threading

import pytest

from kvbaton.errors import Incompatible, PeerLost, PostFailed, RemoteProtocolError
from kvbaton.runtime.metrics import DROPPED, METRICS, OVERLAP, XFER_TIME, Channel, Kind, Why
from kvbaton.runtime.tally import Tally
from kvbaton.types import End

NOTHING_WAITS = {
    "peers|prefill|connecting": 0.0,
    "peers|prefill|connected": 0.0,
    "peers|decode|connecting": 0.0,
    "peers|decode|connected": 0.0,
    "pinned_blocks|prefill": 0.0,
    "waiting_transfers|prefill": 0.0,
    "oldest_wait_seconds|prefill": 0.0,
    "pinned_blocks|decode": 0.0,
    "waiting_transfers|decode": 0.0,
    "oldest_wait_seconds|decode": 0.0,
}


def test_what_was_counted_is_taken_once() -> None:
    tally = Tally()
    tally.observe(XFER_TIME, 0.5)
    tally.observe(XFER_TIME, 0.25)
    tally.observe(OVERLAP, 1.0)
    tally.count(DROPPED, Channel.TRANSPORT)
    tally.count(DROPPED, Channel.TRANSPORT)
    taken = tally.take(0.0)
    assert taken is not None
    assert taken.observed == {"xfer_time_seconds": [0.5, 0.25], "overlap_ratio": [1.0]}
    assert taken.counted == {"messages_dropped|transport": 2}
    assert taken.gauges == NOTHING_WAITS
    assert tally.take(0.0) is None


def test_gauges_are_told_when_they_change_and_ages_every_second() -> None:
    tally = Tally()
    assert tally.take(0.0) is not None
    tally.wait_begins(End.SOURCE, "a", 0, 1.0)
    tally.wait_begins(End.SOURCE, "b", 5, 1.5)
    tally.wait_begins(End.SOURCE, "a", 10, 1.6)  # known
    tally.wait_begins(End.SOURCE, "before the engine's own request", None, 0.5)
    first = tally.take(2.0)
    assert first is not None
    assert first.gauges == NOTHING_WAITS | {
        "pinned_blocks|prefill": 15.0,
        "waiting_transfers|prefill": 2.0,
        "oldest_wait_seconds|prefill": 1.0,
    }
    assert tally.take(2.9) is None
    later = tally.take(3.0)
    assert later is not None
    assert later.gauges["oldest_wait_seconds|prefill"] == 2.0
    tally.wait_ends(End.SOURCE, "a")
    tally.wait_ends(End.SOURCE, "a")
    changed = tally.take(3.0)
    assert changed is not None
    assert (changed.gauges["pinned_blocks|prefill"], changed.gauges["oldest_wait_seconds|prefill"]) == (5.0, 1.5)
    tally.wait_ends(End.SOURCE, "b")
    over = tally.take(3.0)
    assert over is not None
    assert over.gauges == NOTHING_WAITS
    tally.wait_ends(End.SOURCE, "before the engine's own request")
    assert tally.take(3.0) is not None
    assert tally.take(99.0) is None


def test_peers_are_those_with_open_transfers_and_connected_once_something_came() -> None:
    tally = Tally()

    def peers() -> dict[str, float] | None:
        taken = tally.take(0.0)
        if taken is None:
            return None
        return {key: value for key, value in taken.gauges.items() if key.startswith("peers") and value}

    assert peers() == {}
    tally.peer_opens(End.SOURCE, "D/0", is_connected=False)
    tally.peer_opens(End.SOURCE, "D/1", is_connected=True)
    tally.peer_opens(End.DESTINATION, "D/0", is_connected=False)
    assert peers() == {"peers|prefill|connecting": 1, "peers|prefill|connected": 1, "peers|decode|connecting": 1}
    tally.peer_opens(End.SOURCE, "D/0", is_connected=False)
    assert peers() is None
    tally.peer_connects(End.SOURCE, "D/0")
    tally.peer_connects(End.SOURCE, "nobody")
    assert peers() == {"peers|prefill|connected": 2, "peers|decode|connecting": 1}
    tally.peer_closes(End.SOURCE, "D/0")
    tally.peer_connects(End.SOURCE, "D/0")
    assert peers() is None
    tally.peer_closes(End.SOURCE, "D/0")
    tally.peer_closes(End.SOURCE, "D/1")
    tally.peer_closes(End.DESTINATION, "D/0")
    assert peers() == {}


def test_a_long_wait_is_named_after_five_seconds_after_thirty_and_each_time_that_doubles() -> None:
    tally = Tally()
    tally.wait_begins(End.DESTINATION, "d", 1, 100.0)
    named = [now_s - 100 for now_s in range(100, 360) if tally.long_waits(End.DESTINATION, float(now_s))]
    assert named == [5, 30, 60, 120, 240]
    assert tally.long_waits(End.SOURCE, 400.0) == []


def test_waits_of_both_ends_are_apart_and_one_that_ended_is_not_named() -> None:
    tally = Tally(first_report_s=1.0)
    tally.wait_begins(End.DESTINATION, "t", 1, 0.0)
    tally.wait_begins(End.SOURCE, "t", 1, 0.0)
    tally.wait_ends(End.SOURCE, "t")
    assert tally.long_waits(End.SOURCE, 2.0) == []
    assert tally.long_waits(End.DESTINATION, 2.0) == [("t", 2.0)]


def test_nothing_is_lost_between_two_threads() -> None:
    tally, total = Tally(), 0

    def drive() -> None:
        for _ in range(5000):
            tally.count(DROPPED, Channel.TRANSPORT)

    driver = threading.Thread(target=drive)
    driver.start()
    while driver.is_alive():
        taken = tally.take(0.0)
        total += sum(taken.counted.values()) if taken else 0
    rest = tally.take(0.0)
    assert total + (sum(rest.counted.values()) if rest else 0) == 5000


def test_labels_are_those_of_the_table() -> None:
    with pytest.raises(AssertionError, match="messages_dropped"):
        Tally().count(DROPPED, Why.OTHER)


def test_the_table_has_no_name_twice_and_a_histogram_has_rising_buckets() -> None:
    assert len({metric.suffix for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_errors_of_ours_have_a_class_of_reason() -> None:
    errors = (PeerLost("x"), Incompatible("x"), RemoteProtocolError("x"), PostFailed("x"))
    assert [Why.of(error) for error in errors] == [Why.PEER_LOST, Why.MISMATCH, Why.MISMATCH, Why.NOT_MOVED]
