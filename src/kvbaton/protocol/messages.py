"""Every message on the side channel and in transport notifications: tagged, strictly typed, size-limited.

A message arrives from outside; decoding it either gives one of these structs or raises RemoteProtocolError. Durations
travel, never points in time. Evolution: a field may be added with a default, a message may be added; nothing may be
renamed, retyped or removed without raising PROTOCOL_VERSION. Next: rendezvous.py says what each message leads to.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from kvbaton.errors import RemoteProtocolError, one_line
from kvbaton.geometry.layout import KVLayout
from kvbaton.types import Direction, Outcome

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 16 << 20
MAX_REASON_CHARACTERS = 2000
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
"""Ids and reasons are logged by whoever receives them."""

Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=PRINTABLE)]
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS, pattern=PRINTABLE)]
Blocks: TypeAlias = tuple[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], ...]
"""Block ids per cache group, in token order from token 0; 0 is the null block."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86400)]
MAX_READERS = 4096


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who the sender is, and everything needed to move bytes to or from it. Rides on the first message to a peer."""

    protocol_version: int
    engine_id: Id
    rank: Count
    incarnation: Id
    agent_metadata: bytes
    layout: KVLayout


class Register(msgspec.Struct, frozen=True, tag="register"):
    """D to P: my blocks for this transfer are allocated. Push: write them. Pull: tell me where to read.

    `num_readers` decode ranks take this transfer from the rank that is addressed. `grace_s`: from my last word to you on,
    my blocks stay mine for at least that long. `number` is the registration's among all of this incarnation: the same said
    again has the same, another attempt has another. What is said of a registration later, by either side, carries its number
    (`registration`; 0: not said), because it may be heard when there is another of the same transfer.
    """

    transfer_id: Id
    to_engine_id: Id
    from_incarnation: Id
    direction: Direction
    first_token: Count
    num_tokens: Count
    blocks: Blocks
    grace_s: Seconds
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1
    hello: Hello | None = None
    number: Count = 0


class HelloWanted(msgspec.Struct, frozen=True, tag="hello_wanted"):
    """P to D: I do not know you (I restarted, or forgot); register again and introduce yourself."""

    transfer_id: Id


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """P to D, push: I have not heard of you for a while; do you still want this? Answer Renew with my number, or Cancel."""

    transfer_id: Id
    number: Annotated[int, msgspec.Meta(ge=1)]


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """P to D: the registration stands. Also the answer to Renew."""

    transfer_id: Id


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """P to D, pull: these blocks are final and held for you for `lease_s` from the moment you asked."""

    transfer_id: Id
    num_tokens: Count
    blocks: Blocks
    lease_s: Seconds
    hello: Hello


class SegmentPosted(msgspec.Struct, frozen=True, tag="segment_posted"):
    """P to D, push: a segment is on its way. Only a hint to start looking for its notification."""

    transfer_id: Id


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """D to P: I am still waiting for this transfer. `answers` is the number of the Confirm that asked, if one did.

    `lacks_offer`: pull, and no Offer has come; if one was sent, it was lost.
    """

    transfer_id: Id
    from_incarnation: Id
    answers: Count = 0
    lacks_offer: bool = False
    registration: Count = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """To the side that moves the bytes: stop, and answer Ended once nothing of yours can touch my blocks any more."""

    transfer_id: Id
    from_incarnation: Id
    reason: Reason = ""
    registration: Count = 0


class Release(msgspec.Struct, frozen=True, tag="release"):
    """D to P: nobody will come for this transfer; hold nothing for it."""

    transfer_id: Id
    to_engine_id: Id
    reason: Reason = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """From the side that moves (or would have moved) the bytes: I shall never touch your blocks for this transfer again."""

    transfer_id: Id
    from_incarnation: Id
    outcome: Outcome
    reason: Reason = ""
    registration: Count = 0


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """D to P: your first notification has come through the transport; the link is up."""


SideMessage: TypeAlias = (
    Register | HelloWanted | Confirm | Accepted | Offer | SegmentPosted | Renew | Cancel | Release | Ended | Connected
)


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """P to D through the transport, once per link: makes both libraries finish connecting before the first bytes."""


class SegmentLanded(msgspec.Struct, frozen=True, tag="landed"):
    """P to D with a WRITE: this segment's bytes are in your memory. `is_last` marks the highest number of this sender."""

    transfer_id: Id
    generation: Count
    segment: Count
    is_last: bool
    registration: Count = 0


Notification: TypeAlias = Greeting | SegmentLanded

_encoder = msgspec.msgpack.Encoder()
_side_decoder = msgspec.msgpack.Decoder(SideMessage)
_notification_decoder = msgspec.msgpack.Decoder(Notification)


def encode(message: SideMessage | Notification) -> bytes:
    """The message's bytes. A reason is made fit for the wire: else the receiver would drop the whole message for it."""
    if isinstance(message, Cancel | Ended | Release):
        message = msgspec.structs.replace(message, reason=one_line(message.reason, MAX_REASON_CHARACTERS))
    return _encoder.encode(message)


def decode_side(data: bytes) -> SideMessage:
    """Raises RemoteProtocolError for anything that is not exactly one well-formed message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return _side_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed side-channel message: {error}") from None


def decode_notification(data: bytes) -> Notification:
    """Raises RemoteProtocolError for anything that is not exactly one well-formed notification."""
    try:
        return _notification_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed notification: {error}") from None
