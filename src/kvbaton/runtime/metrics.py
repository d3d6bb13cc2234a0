"""The metrics of an engine, as a table: name, kind, labels, meaning, and what is worth an alarm.

Names are those of vLLM's in-tree NIXL metrics with our own stem where both measure the same, so that a dashboard needs
only another stem. Invariant: a label's values come from an enumeration. docs/metrics.md is generated from this table.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

from kvbaton.errors import BatonError, Incompatible, PeerLost, RemoteProtocolError
from kvbaton.types import End, Outcome

STEM = "vllm:kvbaton_"

SIDE = {End.SOURCE: "prefill", End.DESTINATION: "decode"}
"""The ends' names wherever people read them."""


class Why(enum.Enum):
    """Why a transfer did not deliver, or a registration was refused: classes for metrics. The log has the reason itself."""

    GIVEN_UP = "given_up"
    """The engine at this end gave its request up: the client left, or it was aborted."""
    PEER_GAVE_UP = "peer_gave_up"
    """The other end does not want it any more, or cannot hold it any longer."""
    PEER_ENDED = "peer_ended"
    """The other end said that the transfer failed or expired there."""
    PEER_LOST = "peer_lost"
    """The other end's process is gone, or cannot be reached."""
    SILENCE = "silence"
    """The other end, or the network, showed no progress before the deadline."""
    NOBODY_CAME = "nobody_came"
    """The request's other half never reached this engine."""
    NOT_MOVED = "not_moved"
    """The transport could not carry an operation out."""
    LEASE_ENDED = "lease_ended"
    """The blocks were read too late."""
    CUT_OFF = "cut_off"
    """This end's transport was opened anew, to fence off another peer."""
    MISMATCH = "mismatch"
    """The two ends disagree about the prompt, or cannot be combined."""
    WRONG_ENGINE = "wrong_engine"
    """It was meant for another engine: an address changed hands."""
    TAKEN = "taken"
    """Another request already receives this transfer."""
    TOO_MANY = "too_many"
    """The decode rank has more transfers open than one may have."""
    OVER = "over"
    """The transfer had ended before."""
    OTHER = "other"
    """None of these."""

    @staticmethod
    def of(error: BatonError) -> Why:
        """The class of a reason that is an error of ours."""
        if isinstance(error, PeerLost):
            return Why.PEER_LOST
        return Why.MISMATCH if isinstance(error, Incompatible | RemoteProtocolError) else Why.NOT_MOVED

    @staticmethod
    def told(outcome: Outcome) -> Why:
        """The class of a reason that is the peer's."""
        return Why.PEER_GAVE_UP if outcome is Outcome.CANCELLED else Why.PEER_ENDED


class Way(enum.Enum):
    """The direction of a transfer, where it is known: nobody may ever have asked for its KV."""

    PUSH = "push"
    PULL = "pull"
    UNKNOWN = "unknown"


class Channel(enum.Enum):
    """What a message came through."""

    SIDE_CHANNEL = "side_channel"
    TRANSPORT = "transport"


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    """Nothing has come over the link yet."""
    CONNECTED = "connected"


class Fenced(enum.Enum):
    """What the transport was opened anew against."""

    SILENT_WRITER = "silent_writer"
    """A prefill rank that may still have been writing did not say that it stopped."""
    STUCK_OPERATION = "stuck_operation"
    """The transport did not let go of an operation of ours."""


class Kind(enum.Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True)
class Metric:
    suffix: str
    kind: Kind
    meaning: str
    alarm: str
    labels: dict[str, type[enum.Enum]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    never: frozenset[enum.Enum] = frozenset()
    """Label values that it cannot have."""

    @property
    def name(self) -> str:
        return STEM + self.suffix

    @property
    def shown_name(self) -> str:
        """As it is scraped."""
        return self.name + ("_total" if self.kind is Kind.COUNTER else "")

    def key(self, *values: enum.Enum) -> str:
        """Metric and label values as one plain string."""
        assert [type(value) for value in values] == list(self.labels.values()), f"labels of {self.suffix}"
        assert self.never.isdisjoint(values), f"labels of {self.suffix}"
        return "|".join([self.suffix, *(label_value(value) for value in values)])

    def label_values(self) -> dict[str, list[enum.Enum]]:
        """The values that each label can have."""
        return {name: [value for value in kind if value not in self.never] for name, kind in self.labels.items()}

    def all_keys(self) -> list[str]:
        """Of every series that there can ever be."""
        return [self.key(*values) for values in itertools.product(*self.label_values().values())]


def label_value(value: enum.Enum) -> str:
    return SIDE[value] if isinstance(value, End) else str(value.value)


_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
_DESCRIPTORS = (10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4)
_OPERATION = "One posted operation: a segment written (push) or read (pull)."

XFER_TIME = Metric(
    "xfer_time_seconds", Kind.HISTOGRAM, "From posting an operation until the transport was done with it.",
    "p90 several times the usual: the network or the peer's memory is congested.", buckets=_SECONDS,
)  # fmt: skip
POST_TIME = Metric(
    "post_time_seconds", Kind.HISTOGRAM, "Handing an operation to the transport; some transports copy right there.",
    "p90 above 0.1 s: too many small pieces, or a transport that copies (see doctor).", buckets=_SECONDS,
)  # fmt: skip
BYTES = Metric("bytes_transferred", Kind.HISTOGRAM, f"Bytes. {_OPERATION}", "-", buckets=_BYTES)
DESCRIPTORS = Metric(
    "num_descriptors", Kind.HISTOGRAM, f"Memory ranges, neighbours merged. {_OPERATION}",
    "-", buckets=_DESCRIPTORS,
)  # fmt: skip
SEGMENTS = Metric(
    "num_segments", Kind.HISTOGRAM, "Segments of one delivered transfer between two ranks, counted by the rank that moves.",
    "-", buckets=(1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0),
)  # fmt: skip
OVERLAP = Metric(
    "overlap_ratio", Kind.HISTOGRAM,
    "Share of a pushed transfer's bytes that had landed when its prefill was over: what streaming hid. Counted by P.",
    "Mean near 0 with prompts of several chunks: streaming is off, or writing is slower than computing.",
    buckets=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99),
)  # fmt: skip
FAILED_TRANSFERS = Metric(
    "num_failed_transfers", Kind.COUNTER,
    "Operations, notifications and handshakes that failed. As in-tree, the three together.",
    "Any steady rate: the transport or a peer is broken; the log says which.",
)  # fmt: skip
FAILED_NOTIFICATIONS = Metric(
    "num_failed_notifications", Kind.COUNTER, "Of these, notifications that could not be sent.", "As above."
)
FAILED_HANDSHAKES = Metric(
    "num_failed_handshakes", Kind.COUNTER, "Of these, peers that introduced themselves and could not be connected.",
    "Any: two engines that do not fit together, or an unreachable address.",
)  # fmt: skip
EXPIRED = Metric(
    "num_kv_expired_reqs", Kind.COUNTER, "Prefill requests whose blocks were held until the lease ended. Counted by P.",
    "Any steady rate: requests are prefilled that nobody decodes. Too few decode engines, or a router that drops legs.",
)  # fmt: skip
TRANSFERS = Metric(
    "transfers", Kind.COUNTER, "Transfers that are over, one per request and rank, at the end that counts them.",
    "Share of outcomes other than delivered above what clients cancel.",
    labels={"end": End, "direction": Way, "outcome": Outcome},
)  # fmt: skip
UNDELIVERED = Metric(
    "transfers_undelivered", Kind.COUNTER, "Those that did not deliver, by class of reason.",
    "peer_lost, silence, not_moved, mismatch, cut_off: any. nobody_came: see num_kv_expired_reqs.",
    labels={"end": End, "outcome": Outcome, "reason": Why}, never=frozenset({Outcome.DELIVERED}),
)  # fmt: skip
REFUSED = Metric(
    "registrations_refused", Kind.COUNTER, "Registrations that P answered with no, by class of reason.",
    "wrong_engine, mismatch: any. over: decode engines come later than the lease allows.",
    labels={"reason": Why},
)  # fmt: skip
DROPPED = Metric(
    "messages_dropped", Kind.COUNTER, "Messages that were malformed or not allowed.",
    "Any: another release of kvbaton, or somebody who has no business here.", labels={"channel": Channel},
)  # fmt: skip
FENCES = Metric(
    "fences", Kind.COUNTER,
    "Times that a rank opened its transport anew, so that nothing begun before can reach its memory. All in flight fails.",
    "Any steady rate: engines that hang, or a network that loses them. The log says whom.", labels={"reason": Fenced},
)  # fmt: skip
PINNED = Metric(
    "pinned_blocks", Kind.GAUGE,
    "Blocks held only for transfers: at P after the engine is done with the request, at D while their KV is awaited.",
    "P: a large part of the pool for minutes: decode engines do not keep up. Must return to 0 when idle.",
    labels={"end": End},
)  # fmt: skip
WAITING = Metric(
    "waiting_transfers", Kind.GAUGE,
    "Transfers that wait: at P for the decode side, once the prefill is over; at D for their KV.",
    "Growing without end.", labels={"end": End},
)  # fmt: skip
OLDEST = Metric(
    "oldest_wait_seconds", Kind.GAUGE, "How long the oldest of them has waited.",
    "Above the lease (lease_s, 30 s): something does not end as it must. The log says who waits for whom.",
    labels={"end": End},
)  # fmt: skip
PEERS = Metric(
    "peers", Kind.GAUGE,
    "Ranks of other engines with which requests of this engine have transfers open: decode ranks at P, prefill ranks at D.",
    "connecting for more than a few seconds.", labels={"end": End, "state": PeerState},
)  # fmt: skip

METRICS = (
    XFER_TIME, POST_TIME, BYTES, DESCRIPTORS, SEGMENTS, OVERLAP, FAILED_TRANSFERS, FAILED_NOTIFICATIONS, FAILED_HANDSHAKES,
    EXPIRED, TRANSFERS, UNDELIVERED, REFUSED, DROPPED, FENCES, PINNED, WAITING, OLDEST, PEERS,
)  # fmt: skip
