"""Who waits for whom, and why, in one sentence. Pure: plain facts in, text out.

Invariant: a sentence names the transfer, how long it has waited, and the one thing it waits for next. The ends fill the facts
in (source_transfer.py, destination_transfer.py); tally.py knows when a wait is long.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.protocol.rendezvous import State
from kvbaton.types import Direction


@dataclass(frozen=True)
class KVWait:
    """A decode rank waits for the KV of a request from (one of) its prefill ranks."""

    transfer_id: str
    waited_s: float
    direction: Direction
    peer_name: str
    address: str
    state: State
    is_accepted: bool
    num_arrived: int = 0
    """Segments that were written to us (push)."""
    num_in_flight: int = 0
    """Segments that we are reading (pull)."""
    has_line: bool = True
    heard_ago_s: float | None = None
    num_other_ranks: int = 0
    """Further prefill ranks that it waits for as well."""
    ended_because: str = ""


@dataclass(frozen=True)
class ReaderWait:
    """A decode rank that the prefill side serves, and how far it is."""

    peer_name: str
    direction: Direction
    state: State
    num_posted: int = 0
    num_in_flight: int = 0
    is_asked: bool = False
    """Whether it still wants the KV; it has not answered."""
    heard_ago_s: float | None = None


@dataclass(frozen=True)
class BlocksWait:
    """A prefill rank holds a request's blocks for decode ranks; or waits for the request itself."""

    transfer_id: str
    waited_s: float
    request_id: str | None
    num_blocks: int = 0
    num_registered: int = 0
    num_readers: int | None = None
    """How many decode ranks are to come, once known."""
    slowest: ReaderWait | None = None
    """One that registered and is not done."""


def decode_sentence(wait: KVWait) -> str:
    who = f"prefill rank {wait.peer_name} at {wait.address}"
    if wait.num_other_ranks:
        who += f" and {_count(wait.num_other_ranks, 'other rank')}"
    if wait.state is State.DRAINING:
        return (
            f"Transfer {wait.transfer_id}: given up ({wait.ended_because}), but its blocks have waited {_s(wait.waited_s)} "
            f"until nothing can touch them: {_draining(wait)}; {_link(wait)}"
        )
    return (
        f"Transfer {wait.transfer_id}: the decode side has waited {_s(wait.waited_s)} for {who} "
        f"({_progress(wait)}; {_link(wait)})"
    )


def _progress(wait: KVWait) -> str:
    if not wait.is_accepted:
        return "registered, not accepted yet"
    if wait.direction is Direction.PUSH:
        arrived = f"{_count(wait.num_arrived, 'segment')} arrived" if wait.num_arrived else "no segment has arrived"
        return f"registered, accepted; {arrived}"
    if wait.state is State.OPEN:
        return "registered, accepted; its blocks are not offered yet"
    return f"offered; {_count(wait.num_in_flight, 'segment')} being read"


def _draining(wait: KVWait) -> str:
    if wait.num_in_flight:
        return f"the transport still reads {_count(wait.num_in_flight, 'segment')}"
    return f"{wait.peer_name} has not said that it stopped"


def _link(wait: KVWait) -> str:
    if not wait.has_line:
        return "no connection"
    if wait.heard_ago_s is None:
        return "nothing heard from it yet"
    return f"connection up, last heard {_s(wait.heard_ago_s)} ago"


def prefill_sentence(wait: BlocksWait) -> str:
    if wait.request_id is None:
        who = "the decode side" if wait.slowest is None else f"decode rank {wait.slowest.peer_name}"
        return (
            f"Transfer {wait.transfer_id}: {who} has registered and waited {_s(wait.waited_s)} for the prefill request, "
            "which has not come to this engine"
        )
    return (
        f"Transfer {wait.transfer_id}: {_count(wait.num_blocks, 'block')} of request {wait.request_id} "
        f"{'has' if wait.num_blocks == 1 else 'have'} been held for {_s(wait.waited_s)}: {_missing(wait)}"
    )


def _missing(wait: BlocksWait) -> str:
    if wait.num_registered == 0:
        return "no decode side has registered"
    if wait.slowest is not None:
        return _reader(wait.slowest)
    return f"{wait.num_registered} of {wait.num_readers} decode ranks have registered"


def _reader(reader: ReaderWait) -> str:
    who = f"decode rank {reader.peer_name}"
    heard = "nothing heard from it that is known to be fresh"
    if reader.heard_ago_s is not None:
        heard = f"last heard {_s(reader.heard_ago_s)} ago"
    if reader.state is State.DRAINING:
        still = f"{_count(reader.num_in_flight, 'segment')} in flight" if reader.num_in_flight else "its answer missing"
        return f"{who} is given up, with {still} ({heard})"
    if reader.direction is Direction.PULL:
        return f"{who} has been offered them and has not finished reading ({heard})"
    if reader.is_asked:
        return f"{who} was asked whether it still wants them and has not answered ({heard})"
    return f"{_count(reader.num_posted, 'segment')} posted to {who}, {reader.num_in_flight} in flight ({heard})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds:.0f} s"
