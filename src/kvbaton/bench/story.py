"""`kvbaton timeline`: one transfer's events in order, over router and both engines, with relative milliseconds.

Invariant: what the files hold is shown, and nothing is concluded from it; `timeline` makes spans of the same events. Clocks
of several machines are not corrected. Next: `timeline`, for the events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from kvbaton.bench.text import table
from kvbaton.bench.timeline import Event, read_events
from kvbaton.errors import UsageError

MAX_LISTED = 40
UNREGISTERED = "unregistered"
"""The peer in events about decode ranks that have not come yet."""
_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LANES = ("router", "prefill", "decode")


def main(arguments: Sequence[str], out: TextIO) -> int:
    """Files, and after them perhaps a transfer; without one the transfers in the files are listed, if there are several."""
    paths, wanted = _split(arguments)
    events = read_events(line for path in paths for line in _lines(path))
    if not events:
        raise UsageError(f"no events in {', '.join(map(str, paths))}")
    ids = list(dict.fromkeys(event.transfer_id for event in events))
    if wanted is None and len(ids) > 1:
        out.write(listing(events) + "\n")
        return 0
    transfer_id = ids[0] if wanted is None else find(events, wanted)
    out.write(tell(events, transfer_id) + "\n")
    return 0


def _split(arguments: Sequence[str]) -> tuple[list[Path], str | None]:
    paths = [Path(argument) for argument in arguments]
    wanted = None
    if len(paths) > 1 and not paths[-1].exists():
        wanted = arguments[-1]
        paths.pop()
    for path in paths:
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file; a timeline is read from the files that trace_path or --trace-file name"
            )
    return paths, wanted


def _lines(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        yield from file


def find(events: Iterable[Event], wanted: str) -> str:
    """The transfer of this id, of an id that begins so, or of a request. Raises UsageError when none or several are."""
    found: dict[str, None] = {}
    for event in events:
        if event.transfer_id == wanted:
            return wanted
        if event.transfer_id.startswith(wanted) or wanted in (event.request_id or ""):
            found[event.transfer_id] = None
    if not found:
        raise UsageError(f"no transfer of id {wanted!r} in these files; without an id they are listed")
    if len(found) > 1:
        raise UsageError(f"{len(found)} transfers match {wanted!r}: {', '.join(list(found)[:5])}")
    return next(iter(found))


def listing(events: Sequence[Event]) -> str:
    """One line per transfer, the newest last."""
    by_id: dict[str, list[Event]] = {}
    for event in events:
        by_id.setdefault(event.transfer_id, []).append(event)
    shown = list(by_id.items())[-MAX_LISTED:]
    rows = [("transfer", "direction", "seen by", "outcome", "events", "ms"), *(_row(each, of) for each, of in shown)]
    left_out = len(by_id) - len(shown)
    note = f"\n{left_out} older ones are not shown." if left_out else ""
    return f"{table(rows)}{note}\nName a transfer, or the beginning of its id, after the files to see its events."


def _row(transfer_id: str, events: Sequence[Event]) -> tuple[str, ...]:
    took_ms = (events[-1].t_unix_s - events[0].t_unix_s) * 1e3
    lanes = [lane for lane in _LANES if any(event.who == lane for event in events)]
    return transfer_id, _direction(events), "+".join(lanes), _outcome(events), str(len(events)), f"{took_ms:,.0f}"


def _direction(events: Iterable[Event]) -> str:
    return next((event.direction for event in events if event.direction), "-")


def _outcome(events: Iterable[Event]) -> str:
    """What either engine says, the worst first: a transfer that one end calls delivered may have failed at the other."""
    outcomes = {event.outcome for event in events if event.event == "closed" and event.outcome}
    return next((each for each in sorted(outcomes) if each != "delivered"), "delivered" if outcomes else "-")


def tell(events: Sequence[Event], transfer_id: str) -> str:
    """A line per event: when, how long after the one before, who, what."""
    own = [event for event in events if event.transfer_id == transfer_id]
    start_s = previous_s = own[0].t_unix_s
    names = [_name(event) for event in own]
    width = max(map(len, names))
    outcome = _outcome(own)
    lines = [f"{transfer_id}: {_direction(own)}, {outcome if outcome != '-' else 'not over'}, {len(own)} events"]
    lines.append(f"{'ms':>10}  {'+ms':>8}  {'who':<7}  event")
    for event, name in zip(own, names, strict=True):
        at_ms, gap_ms = (event.t_unix_s - start_s) * 1e3, (event.t_unix_s - previous_s) * 1e3
        previous_s = event.t_unix_s
        lines.append(f"{at_ms:10,.1f}  {gap_ms:8,.1f}  {event.who:<7}  {name:<{width}}  {_details(event)}".rstrip())
    return "\n".join(lines)


def _name(event: Event) -> str:
    if event.event != "transition":
        return event.event
    # Waiting for decode ranks ends when the last has come; the transfer goes on, with each of them.
    subject = "unregistered: " if event.peer == UNREGISTERED else ""
    return f"{subject}{event.from_state} > {event.to_state}"


_SHOWN: tuple[tuple[str, Callable[[Event], str | None]], ...] = (
    ("input", lambda event: event.input),
    ("outcome", lambda event: None if event.peer == UNREGISTERED and event.outcome == "delivered" else event.outcome),
    ("elapsed", lambda event: None if event.elapsed_s is None else f"after {_duration(event.elapsed_s)}"),
    ("direction", lambda event: event.direction),
    ("segment", lambda event: None if event.segment is None else f"segment {event.segment}"),
    ("tokens", lambda event: None if event.num_tokens is None else f"{event.num_tokens} tokens"),
    ("last", lambda event: "the last" if event.last else None),
    ("blocks", lambda event: None if event.num_blocks is None else f"{event.num_blocks} blocks"),
    ("bytes", lambda event: f"{event.num_bytes / 1e6:,.2f} MB" if event.num_bytes else None),
    ("descriptors", lambda event: None if event.num_descriptors is None else f"{event.num_descriptors} descriptors"),
    ("plan", lambda event: None if event.plan_s is None else f"planned in {_duration(event.plan_s)}"),
    ("post", lambda event: f"posted in {_duration(event.post_s)}" if event.post_s else None),
    ("move", lambda event: None if event.move_s is None else f"moved in {_duration(event.move_s)}"),
    ("status", lambda event: None if event.status is None else f"HTTP {event.status}"),
    ("url", lambda event: event.url),
    ("request", lambda event: event.request_id if event.event in {"received", "queued"} else None),
    ("peer", lambda event: f"peer {_short(event.peer)}" if event.peer and event.peer != UNREGISTERED else None),
    ("reason", lambda event: event.reason or None),
)


def _details(event: Event) -> str:
    return ", ".join(text for _, shown in _SHOWN if (text := shown(event)) is not None)


def _short(peer: str) -> str:
    """Engine and rank; of an engine's id that was made up by vLLM the first part is enough."""
    engine, slash, rank = peer.rpartition("/")
    return f"{engine[:8] if _MADE_UP.fullmatch(engine) else engine}{slash}{rank}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"
