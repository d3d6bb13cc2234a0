"""One transfer's events, from router, prefill and decode, merged into named spans.

Invariant: pure, and tolerant: a trace may lack events or end in the middle of a line; what is missing is named and what
can still be said is said. Times are milliseconds after the router received the request, or after the first event known.
Read docs/decisions/001-seams.md for the events, `text` and `pictures` for how spans are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace; events have further fields that nobody needs here."""

    t_unix_s: float
    who: str
    event: str
    transfer_id: str
    request_id: str | None = None
    direction: str | None = None
    segment: int | None = None
    num_bytes: int = 0
    num_tokens: int | None = None
    last: bool = False
    post_s: float = 0.0
    outcome: str | None = None
    num_blocks: int | None = None
    num_descriptors: int | None = None
    plan_s: float | None = None
    move_s: float | None = None
    elapsed_s: float | None = None
    from_state: str | None = None
    to_state: str | None = None
    input: str | None = None
    peer: str | None = None
    reason: str | None = None
    status: int | None = None
    url: str | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took time. `lane` is who spent it."""

    name: str
    lane: str
    start_ms: float
    end_ms: float
    num_bytes: int | None = None

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One request's way. `missing` names events that were looked for and not found."""

    transfer_id: str
    direction: str | None
    spans: tuple[Span, ...]
    missing: tuple[str, ...]
    first_byte_ms: float | None
    exposed_handoff_ms: float | None
    """From the end of prefill until the last KV was there: what the handoff adds that streaming could not hide."""
    num_bytes: int
    num_prompt_tokens: int | None

    def span(self, name: str) -> Span | None:
        """The first of that name."""
        return next((span for span in self.spans if span.name == name), None)


def read_events(lines: Iterable[bytes]) -> list[Event]:
    """The events in lines of any traces, oldest first. What is no event is left out: its writer may still be at it."""
    decoder = msgspec.json.Decoder(Event)
    events = []
    for line in lines:
        try:
            events.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return sorted(events, key=lambda event: event.t_unix_s)


def transfer_of(events: Iterable[Event], request_id: str) -> str | None:
    """The transfer the router made for `request_id`, the last one where it had to dispatch again."""
    found = [event.transfer_id for event in events if event.who == "router" and event.request_id == request_id]
    return found[-1] if found else None


def assemble(events: Sequence[Event], transfer_id: str) -> Timeline:
    """The spans of one transfer. `events` may hold those of many."""
    story = _Story([event for event in events if event.transfer_id == transfer_id])
    received = story.first("router", "received")
    direction = received.direction if received else None
    mover = "decode" if direction == "pull" else "prefill"
    prefilled = story.last("prefill", "source_advanced", is_last=True)
    arrived = story.last("decode", "segment_arrived" if mover == "prefill" else "segment_moved")
    segments = story.segments(mover)
    spans = [
        story.span("request", "router", received, story.last("router", "finished")),
        story.span("queued", "prefill", story.first("prefill", "queued"), story.first("prefill", "prefill_started")),
        story.span("prefill", "prefill", story.first("prefill", "prefill_started"), prefilled),
        _registration(story),
        *segments,
        story.span("exposed handoff", "decode", prefilled, arrived),
        story.span("decode start", "decode", arrived, story.first("decode", "decode_started")),
        story.span(
            "first token", "decode", story.first("decode", "decode_started"), story.first("router", "first_byte")
        ),
    ]
    first_byte = story.first("router", "first_byte")
    return Timeline(
        transfer_id=transfer_id,
        direction=direction,
        spans=tuple(span for span in spans if span is not None),
        missing=tuple(dict.fromkeys(story.missing)),
        first_byte_ms=story.at_ms(first_byte) if first_byte else None,
        exposed_handoff_ms=(arrived.t_unix_s - prefilled.t_unix_s) * 1e3 if arrived and prefilled else None,
        num_bytes=sum(segment.num_bytes or 0 for segment in segments),
        num_prompt_tokens=prefilled.num_tokens if prefilled else None,
    )


def _registration(story: _Story) -> Span | None:
    """From D's queue until P knows where the KV goes."""
    return story.span(
        "registration", "decode", story.first("decode", "queued"), story.first("prefill", "destination_known")
    )


class _Story:
    """The events of one transfer, and which of those asked for were not there."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.missing: list[str] = []
        received = next((event for event in events if event.event == "received"), None)
        self._origin_s = (received or events[0]).t_unix_s if events else 0.0

    def at_ms(self, event: Event) -> float:
        return (event.t_unix_s - self._origin_s) * 1e3

    def first(self, who: str, name: str) -> Event | None:
        return next(iter(self._all(who, name)), None)

    def last(self, who: str, name: str, *, is_last: bool = False) -> Event | None:
        """`is_last` asks for the one that says so: others of the name came before it."""
        found = [event for event in self._all(who, name) if event.last or not is_last]
        if is_last and not found:
            self.missing.append(f"{who} {name} (last)")
        return found[-1] if found else None

    def span(self, name: str, lane: str, start: Event | None, end: Event | None) -> Span | None:
        """None where an end is unknown. Where two processes disagree about the order, it takes no time."""
        if start is None or end is None:
            return None
        start_ms = self.at_ms(start)
        return Span(name=name, lane=lane, start_ms=start_ms, end_ms=max(start_ms, self.at_ms(end)))

    def segments(self, mover: str) -> list[Span]:
        """One span per segment written or read. Posting may be the moving itself, so it is part of the span."""
        posted = {event.segment: event for event in self._all(mover, "segment_posted")}
        moved = {event.segment: event for event in self._all(mover, "segment_moved")}
        spans = []
        for number, start in posted.items():
            end = moved.get(number)
            if end is None:
                self.missing.append(f"{mover} segment_moved ({number})")
                continue
            start_ms = self.at_ms(start) - start.post_s * 1e3
            name = f"segment {number}"
            spans.append(
                Span(name=name, lane=mover, start_ms=start_ms, end_ms=self.at_ms(end), num_bytes=start.num_bytes)
            )
        return spans

    def _all(self, who: str, name: str) -> list[Event]:
        found = [event for event in self._events if event.who == who and event.event == name]
        if not found:
            self.missing.append(f"{who} {name}")
        return found
