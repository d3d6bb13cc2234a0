"""Timelines out of whole, partial and foreign traces."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench.text import bar, shown_until_ms, timeline_text
from kvbaton.bench.timeline import Event, Span, Timeline, assemble, read_events, transfer_of

PUSH: list[dict[str, object]] = [
    {"t": 0.000, "who": "router", "event": "received", "request_id": "r1", "direction": "push", "path": "/v1/chat"},
    {"t": 0.001, "who": "router", "event": "prefill_dispatched", "request_id": "r1", "url": "http://p"},
    {"t": 0.002, "who": "router", "event": "decode_dispatched", "request_id": "r1", "url": "http://d"},
    {"t": 0.010, "who": "prefill", "event": "queued", "request_id": "cmpl-r1-0"},
    {"t": 0.011, "who": "decode", "event": "queued", "request_id": "cmpl-r1-0"},
    {"t": 0.012, "who": "prefill", "event": "prefill_started"},
    {"t": 0.013, "who": "decode", "event": "registered", "num_blocks": 20},
    {"t": 0.014, "who": "prefill", "event": "destination_known"},
    {"t": 0.300, "who": "prefill", "event": "source_advanced", "num_tokens": 256, "last": False},
    {"t": 0.305, "who": "prefill", "event": "segment_posted", "segment": 0, "num_bytes": 4000000, "post_s": 0.004},
    {"t": 0.306, "who": "prefill", "event": "segment_moved", "segment": 0, "num_bytes": 4000000, "move_s": 0.005},
    {"t": 0.307, "who": "decode", "event": "segment_arrived", "segment": 0},
    {"t": 0.500, "who": "prefill", "event": "source_advanced", "num_tokens": 400, "last": True},
    {"t": 0.503, "who": "prefill", "event": "segment_posted", "segment": 1, "num_bytes": 2000000, "post_s": 0.002},
    {"t": 0.504, "who": "prefill", "event": "segment_moved", "segment": 1, "num_bytes": 2000000, "move_s": 0.003},
    {"t": 0.506, "who": "decode", "event": "segment_arrived", "segment": 1},
    {"t": 0.510, "who": "decode", "event": "decode_started"},
    {"t": 0.600, "who": "router", "event": "first_byte", "request_id": "r1"},
    {"t": 1.000, "who": "router", "event": "finished", "request_id": "r1", "status": 200, "outcome": "ok"},
]


def lines(events: list[dict[str, object]], transfer_id: str = "x1", origin_s: float = 1796070000.0) -> list[bytes]:
    made = []
    for event in events:
        fields = {key: value for key, value in event.items() if key != "t"}
        at_s = event["t"]
        assert isinstance(at_s, float)
        made.append(json.dumps({"t_unix_s": origin_s + at_s, "transfer_id": transfer_id, **fields}).encode())
    return made


def pull() -> list[dict[str, object]]:
    """P writes nothing: D reads, after P has answered."""
    events = [each for each in PUSH if not str(each["event"]).startswith("segment")]
    events[0] = events[0] | {"direction": "pull"}
    return [
        *events,
        {"t": 0.520, "who": "decode", "event": "segment_posted", "segment": 0, "num_bytes": 6000000, "post_s": 0.003},
        {"t": 0.521, "who": "decode", "event": "segment_moved", "segment": 0, "num_bytes": 6000000},
    ]


def of(events: list[dict[str, object]]) -> Timeline:
    return assemble(read_events(lines(events)), "x1")


class TestPush:
    def test_spans_say_what_took_how_long(self) -> None:
        timeline = of(PUSH)
        durations = {span.name: (span.lane, round(span.duration_ms, 2)) for span in timeline.spans}
        assert durations == {
            "request": ("router", 1000),
            "queued": ("prefill", 2),
            "prefill": ("prefill", 488),
            "registration": ("decode", 3),
            "segment 0": ("prefill", 5),
            "segment 1": ("prefill", 3),
            "exposed handoff": ("decode", 6),
            "decode start": ("decode", 4),
            "first token": ("decode", 90),
        }
        assert timeline.missing == ()

    def test_figures_of_the_whole(self) -> None:
        timeline = of(PUSH)
        assert timeline.direction == "push"
        assert timeline.num_bytes == 6_000_000
        assert timeline.num_prompt_tokens == 400
        assert timeline.first_byte_ms == pytest.approx(600, abs=1e-3)
        assert timeline.exposed_handoff_ms == pytest.approx(6, abs=1e-3)

    def test_order_of_files_and_other_transfers_do_not_matter(self) -> None:
        mixed = lines(PUSH) + lines(PUSH, transfer_id="x2", origin_s=1796070000.1)
        random.Random(7).shuffle(mixed)
        assert assemble(read_events(mixed), "x1") == of(PUSH)


def test_pull_moves_in_the_decode_lane() -> None:
    timeline = of(pull())
    segment = timeline.span("segment 0")
    assert segment is not None
    assert (segment.lane, segment.num_bytes) == ("decode", 6_000_000)
    assert timeline.exposed_handoff_ms == pytest.approx(21, abs=1e-3)
    assert timeline.missing == ()


class TestGaps:
    @given(st.sets(st.integers(0, len(PUSH) - 1)))
    def test_any_part_of_a_trace_makes_a_timeline(self, dropped: set[int]) -> None:
        timeline = of([event for index, event in enumerate(PUSH) if index not in dropped])
        assert all(span.duration_ms >= 0 for span in timeline.spans)
        assert timeline_text(timeline)
        if not dropped:
            assert timeline.missing == ()

    @pytest.mark.parametrize("index", range(len(PUSH)))
    def test_what_is_missing_is_named(self, index: int) -> None:
        gone = PUSH[index]
        timeline = of([event for event in PUSH if event is not gone])
        optional = ("prefill_dispatched", "decode_dispatched", "registered", "segment_arrived", "segment_posted")
        if str(gone["event"]) in optional or gone.get("last") is False:
            assert timeline.missing == ()
        else:
            assert any(str(gone["event"]) in name for name in timeline.missing)

    def test_a_segment_on_its_way_is_missing(self) -> None:
        timeline = of([event for event in PUSH if event.get("segment") != 1 or event["event"] != "segment_moved"])
        assert timeline.missing == ("prefill segment_moved (1)",)
        assert timeline.num_bytes == 4_000_000

    def test_nothing_at_all(self) -> None:
        timeline = assemble([], "x1")
        assert timeline.spans == ()
        assert timeline.exposed_handoff_ms is timeline.first_byte_ms is None
        assert "router received" in timeline.missing
        assert timeline.span("prefill") is None
        assert timeline_text(timeline).startswith("direction unknown")

    def test_without_the_router_time_starts_with_the_first_event(self) -> None:
        timeline = of([event for event in PUSH if event["who"] != "router"])
        queued = timeline.span("queued")
        assert queued is not None
        assert queued.start_ms == 0.0

    def test_clocks_that_disagree_make_no_negative_time(self) -> None:
        early = [event | {"t": 0.499} if event["event"] == "decode_started" else event for event in PUSH]
        start = of(early).span("decode start")
        assert start is not None
        assert start.duration_ms == 0.0


def test_torn_and_foreign_lines_are_left_out() -> None:
    whole = lines(PUSH)
    torn = [*whole, whole[3][:40], b"", b"\xff\xfe", b'{"event": "queued"}', b'{"t_unix_s": "now"}']
    assert read_events(torn) == read_events(whole)


def test_a_request_is_found_by_its_id() -> None:
    events = read_events(lines(PUSH) + lines(PUSH, transfer_id="x2", origin_s=1796070001.0))
    assert transfer_of(events, "r1") == "x2"
    assert transfer_of(events, "r2") is None


class TestText:
    def test_a_line_per_span(self) -> None:
        text = timeline_text(of(PUSH))
        assert text.splitlines()[0] == (
            "push, 400 prompt tokens, 6.00 MB of KV, first token after 600 ms, of which the handoff 6.0 ms"
        )
        assert len(text.splitlines()) == len(of(PUSH).spans) + 2
        assert "4.00 MB" in text

    def test_bars_line_up(self) -> None:
        until_ms = shown_until_ms(of(PUSH))
        assert {len(bar(span, until_ms)) for span in of(PUSH).spans} == {44}

    @given(st.floats(-10, 2000), st.floats(0, 2000), st.floats(0.001, 1000))
    def test_every_span_is_visible_and_within(self, start_ms: float, duration_ms: float, until_ms: float) -> None:
        drawn = bar(Span(name="s", lane="l", start_ms=start_ms, end_ms=start_ms + duration_ms), until_ms, columns=30)
        assert len(drawn) == 30
        assert drawn.strip()

    def test_missing_events_are_told(self) -> None:
        assert "not in the traces: decode decode_started" in timeline_text(
            of([event for event in PUSH if event["event"] != "decode_started"])
        )

    def test_events_keep_what_is_needed(self) -> None:
        event = read_events(lines(PUSH))[0]
        assert event == Event(
            t_unix_s=1796070000.0, who="router", event="received", transfer_id="x1", request_id="r1", direction="push"
        )
