"""What happens to transfers, told once: to the log, to the timeline, and to the metrics.

Invariant: this is the only caller of `Rendezvous.handle`, so no transition goes untold; when neither log nor timeline wants
it, nothing is formatted. Prompts and keys are never among what is told. Next: tally.py, waiting.py.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Protocol

from kvbaton.protocol.rendezvous import Effect, Input, Rendezvous
from kvbaton.runtime.metrics import (
    BYTES,
    DESCRIPTORS,
    EXPIRED,
    FAILED_HANDSHAKES,
    FAILED_TRANSFERS,
    POST_TIME,
    SIDE,
    TRANSFERS,
    UNDELIVERED,
    XFER_TIME,
    Way,
    Why,
)
from kvbaton.runtime.tally import Tally
from kvbaton.runtime.trace import Trace, TraceField
from kvbaton.types import Direction, End, Outcome, TransferId

logger = logging.getLogger("vllm.kvbaton")

WORRYING_WAIT_S = 30.0

_BARE = re.compile(r"[\w./:@+-]+", re.ASCII)

_BY_INPUT = {Input.CANCEL: Why.GIVEN_UP, Input.EXPIRE: Why.SILENCE, Input.LOST: Why.PEER_LOST}


class Party(Protocol):
    """One transfer with one peer, as either end sees it."""

    @property
    def end(self) -> End: ...

    @property
    def transfer_id(self) -> TransferId: ...

    @property
    def peer_name(self) -> str:
        """Who is at the other end, for people."""
        ...

    @property
    def rendezvous(self) -> Rendezvous: ...


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Journal:
    def __init__(self, path: str | None = None, tally: Tally | None = None) -> None:
        """The timeline goes to `path`, when there is one."""
        self.tally = Tally() if tally is None else tally
        self._traces = {end: Trace(path, side) for end, side in SIDE.items()}
        self._why: dict[tuple[End, TransferId], Why] = {}

    def feed(
        self,
        party: Party,
        what: Input,
        now_s: float,
        reason: str = "",
        *,
        why: Why | None = None,
        told: Outcome | None = None,
    ) -> tuple[Effect, ...]:
        """The effects of `what`; the transition, if it is one, is told. `why` is the class of `reason`, `told` the
        outcome that the peer told of.
        """
        rendezvous = party.rendezvous
        before, since_s, was_decided = rendezvous.state, rendezvous.since_s, rendezvous.outcome is not None
        effects = rendezvous.handle(what, now_s, reason, told=told)
        if rendezvous.state is before:
            return effects
        outcome = None if was_decided else rendezvous.outcome
        if outcome is not None and outcome is not Outcome.DELIVERED:
            self._why.setdefault((party.end, party.transfer_id), why or _BY_INPUT.get(what, Why.OTHER))
        level = _level(party.end, outcome)
        if self._traces[party.end].is_on or logger.isEnabledFor(level):
            fields: dict[str, TraceField] = {
                "end": SIDE[party.end],
                "peer": party.peer_name,
                "from_state": before.value,
                "to_state": rendezvous.state.value,
                "input": what.value,
                "elapsed_s": round(now_s - since_s, 6),
            }
            if outcome is not None:
                fields["outcome"] = outcome.value
            if reason:
                fields["reason"] = reason
            self._traces[party.end].emit("transition", party.transfer_id, **fields)
            logger.log(level, "transition transfer_id=%s %s", _value(party.transfer_id), _pairs(fields))
        return effects

    def ended(
        self,
        end: End,
        transfer_id: TransferId,
        outcome: Outcome,
        *,
        direction: Direction | None,
        reason: str,
        num_bytes: int | None = None,
        is_held: bool = False,
    ) -> None:
        """All of a request's legs at this end are over. `is_held`: it still held blocks that were to be fetched."""
        why = self._why.pop((end, transfer_id), Why.OTHER)
        self.tally.count(TRANSFERS, end, Way.UNKNOWN if direction is None else Way(direction.value), outcome)
        if outcome is not Outcome.DELIVERED:
            self.tally.count(UNDELIVERED, end, outcome, why)
        if outcome is Outcome.EXPIRED and is_held and why is not Why.PEER_ENDED:
            self.tally.count(EXPIRED)
        fields: dict[str, TraceField] = {} if num_bytes is None else {"num_bytes": num_bytes}
        self._traces[end].emit("closed", transfer_id, outcome=outcome.value, reason=reason, **fields)

    def waiting(self, sentence: str, waited_s: float) -> None:
        """Said of a wait that is long, and again when it has become longer."""
        logger.log(logging.INFO if waited_s < WORRYING_WAIT_S else logging.WARNING, "%s.", sentence)

    def emit(self, end: End, event: str, transfer_id: TransferId, **fields: TraceField) -> None:
        """An event for the timeline alone."""
        self._traces[end].emit(event, transfer_id, **fields)

    def posted(
        self,
        end: End,
        transfer_id: TransferId,
        *,
        peer: Named,
        segment: int,
        num_bytes: int,
        num_descriptors: int,
        plan_s: float,
        post_s: float,
    ) -> None:
        """The transport took an operation."""
        trace = self._traces[end]
        self.tally.observe(POST_TIME, post_s)
        self.tally.observe(DESCRIPTORS, num_descriptors)
        if trace.is_on:
            trace.emit(
                "segment_posted",
                transfer_id,
                segment=segment,
                num_bytes=num_bytes,
                num_descriptors=num_descriptors,
                plan_s=plan_s,
                post_s=post_s,
                peer=peer.name,
            )

    def moved(
        self, end: End, transfer_id: TransferId, *, peer: Named, segment: int, num_bytes: int, move_s: float
    ) -> None:
        """The transport is done with an operation, well."""
        self.tally.observe(XFER_TIME, move_s)
        self.tally.observe(BYTES, num_bytes)
        trace = self._traces[end]
        if trace.is_on:
            trace.emit(
                "segment_moved", transfer_id, segment=segment, num_bytes=num_bytes, move_s=move_s, peer=peer.name
            )

    def not_moved(self) -> None:
        """The transport refused an operation, or it ended badly. The transfer says why."""
        self.tally.count(FAILED_TRANSFERS)

    def no_handshake(self) -> None:
        """A peer that introduced itself cannot be worked with."""
        self.tally.count(FAILED_TRANSFERS)
        self.tally.count(FAILED_HANDSHAKES)

    def close(self) -> None:
        """Idempotent."""
        for trace in self._traces.values():
            trace.close()


def _level(end: End, outcome: Outcome | None) -> int:
    """An abnormal end is told to the operator where a request fails by it, that is at the decode side."""
    if outcome is None or outcome is Outcome.DELIVERED:
        return logging.DEBUG
    return logging.INFO if outcome is Outcome.CANCELLED or end is End.SOURCE else logging.WARNING


def _pairs(fields: dict[str, TraceField]) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: TraceField) -> str:
    """One word, or quoted with everything escaped: what came from outside cannot begin a line of its own."""
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
