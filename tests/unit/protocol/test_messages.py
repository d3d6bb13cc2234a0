"""The wire: every message survives the trip, and nothing that comes in raises anything but RemoteProtocolError."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvbaton.errors import RemoteProtocolError
from kvbaton.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Accepted,
    Cancel,
    Confirm,
    Connected,
    Ended,
    Greeting,
    Hello,
    HelloWanted,
    Notification,
    Offer,
    Register,
    Release,
    Renew,
    SegmentLanded,
    SegmentPosted,
    SideMessage,
    decode_notification,
    decode_side,
    encode,
)
from kvbaton.types import Direction, Outcome
from tests.unit.geometry.layouts import layout

HELLO = Hello(1, "engine", 0, "incarnation", b"\x00\xff", layout())
SIDE: list[SideMessage] = [
    Register("t", "engine", "incarnation", Direction.PUSH, 16, 40, ((1, 2), (0, 3)), 10.0, 2, HELLO),
    Register("t", "engine", "incarnation", Direction.PULL, 0, 40, ((1, 2),), 10.0),
    HelloWanted("t"),
    Accepted("t"),
    Offer("t", 40, ((1, 2),), 30.0, HELLO),
    SegmentPosted("t"),
    Confirm("t", 3),
    Renew("t", "incarnation", 3),
    Release("t", "engine", "not needed"),
    Cancel("t", "incarnation", "why"),
    Ended("t", "incarnation", Outcome.EXPIRED, "why"),
    Connected(),
]
DECODERS: list[Callable[[bytes], object]] = [decode_side, decode_notification]


@pytest.mark.parametrize("message", SIDE, ids=lambda message: type(message).__name__)
def test_a_side_channel_message_survives_the_trip(message: SideMessage) -> None:
    assert decode_side(encode(message)) == message


@pytest.mark.parametrize("message", [Greeting(), SegmentLanded("t", 1, 2, is_last=True)])
def test_a_notification_survives_the_trip(message: Notification) -> None:
    assert decode_notification(encode(message)) == message


def test_every_side_channel_message_is_tried_here() -> None:
    assert {type(message) for message in SIDE} == set(SideMessage.__args__)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("data", [b"", b"\xc1", b"{}", b"\x80", b"\xff" * 100, msgspec.msgpack.encode({"type": "no"})])
def test_what_is_not_a_message_is_the_peers_mistake(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode(data)


@pytest.mark.parametrize(("decode", "kind"), [(decode_side, "connected"), (decode_notification, "greeting")])
def test_a_message_nested_too_deep_is_the_peers_mistake(decode: Callable[[bytes], object], kind: str) -> None:
    """Found: fields we do not know are skipped by recursion, and RecursionError ended the transfer thread."""
    pack = msgspec.msgpack.encode
    deep = b"\x82" + pack("type") + pack(kind) + pack("unknown") + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(RemoteProtocolError, match="recursion"):
        decode(deep)


def test_a_message_beyond_the_limit_is_not_even_looked_at() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode_side(b"\x00" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "changed",
    [
        {"transfer_id": ""},
        {"transfer_id": "x" * 513},
        {"direction": "sideways"},
        {"first_token": -1},
        {"num_tokens": 1.5},
        {"blocks": ((-1,),)},
        # Found: fits msgpack, not int64; the OverflowError in numpy ended the transfer thread.
        {"blocks": ((1 << 63,),)},
        {"blocks": ((1 << 31,),)},
        {"hello": {"protocol_version": 1}},
        {"grace_s": 0.0},
        {"grace_s": float("inf")},
        {"num_readers": 0},
        {"num_readers": 1 << 40},
    ],
)
def test_a_registration_with_a_value_out_of_range_is_refused(changed: dict[str, object]) -> None:
    whole = msgspec.to_builtins(SIDE[1]) | changed
    with pytest.raises(RemoteProtocolError):
        decode_side(msgspec.msgpack.encode(whole))


def test_fields_of_a_later_release_are_let_pass() -> None:
    data = msgspec.msgpack.encode({"type": "accepted", "transfer_id": "t", "later": [1]})
    assert decode_side(data) == Accepted("t")


@pytest.mark.parametrize(
    "message",
    [Cancel("t", "i", "x" * 9000), Ended("t", "i", Outcome.FAILED, "x" * 9000), Release("t", "e", "x" * 9000)],
)
def test_a_reason_too_long_for_the_wire_is_cut_and_still_arrives(message: Cancel | Ended | Release) -> None:
    """Found: the receiver dropped such an Ended, and waited for its deadline instead of failing at once."""
    arrived = decode_side(encode(message))
    assert isinstance(arrived, Cancel | Ended | Release)
    assert arrived.reason == "x" * 1997 + "..."
