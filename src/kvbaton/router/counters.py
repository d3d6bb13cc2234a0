"""What `/status` counts. Every received request ends in exactly one of `outcomes`.

Read next: `relay.py`, which counts.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from kvbaton.router.flow import Route
from kvbaton.router.request import DecodeOnly


class RequestOutcome(enum.Enum):
    """How a routed request ended; also the timeline's `outcome`."""

    DELIVERED = "delivered"
    ENGINE_ERROR = "engine_error"
    """An engine's own error answer was passed on."""
    ENGINE_LOST = "engine_lost"
    """An engine failed before the answer began; the client got an error status."""
    BROKEN_STREAM = "broken_stream"
    """D failed in mid-stream; the client got an error event."""
    NOT_READY = "not_ready"
    CLIENT_GONE = "client_gone"
    ABORTED = "aborted"
    """The router itself ended it: shut down past its drain time, or a defect."""


@dataclass(slots=True)
class Counters:
    received: int = 0
    rejected: int = 0
    """Refused before routing (4xx of our own); not in `received`."""
    redispatched: int = 0
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    transfers: Counter[Route] = field(default_factory=Counter)
    """Delivered requests for which P confirmed its part."""
    unconfirmed: int = 0
    """Delivered by D before P had answered: no telling whether KV moved."""
    decode_only: Counter[DecodeOnly] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        return self.received - self.outcomes.total()

    def as_json(self) -> dict[str, object]:
        return {
            "requests": {
                "received": self.received,
                "in_flight": self.in_flight,
                "rejected": self.rejected,
                "redispatched": self.redispatched,
                **{outcome.value: self.outcomes[outcome] for outcome in RequestOutcome},
            },
            "transfers": {
                "push": self.transfers[Route.PUSH],
                "pull": self.transfers[Route.PULL],
                "unconfirmed": self.unconfirmed,
            },
            "decode_only": {reason.value: self.decode_only[reason] for reason in DecodeOnly},
        }
