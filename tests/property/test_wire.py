"""What comes from outside, over the side channel or HTTP, is understood or refused; nothing else ever happens."""

from __future__ import annotations

import contextlib
import json
from typing import TypeAlias

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import Incompatible, InvalidParams, RemoteProtocolError
from kvbaton.geometry.descriptors import describe
from kvbaton.geometry.layout import KVLayout, Part, Region
from kvbaton.geometry.mapping import map_layouts
from kvbaton.protocol import messages
from kvbaton.protocol.messages import (
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
    Renew,
    SegmentLanded,
    SegmentPosted,
    SideMessage,
    decode_notification,
    decode_side,
    encode,
)
from kvbaton.protocol.params import DecodeTicket, PrefillTicket, _Wire, parse_params
from kvbaton.types import Direction, End, Outcome, RequestId

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

ids = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)
counts = st.integers(0, (1 << 63) - 1)
blocks = st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=4).map(tuple), max_size=3).map(tuple)
any_int = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-1, 70)
parts = st.builds(Part, *[any_int] * 6)
regions = st.builds(Region, ids, *[any_int] * 8, st.lists(parts, max_size=3).map(tuple))
layouts = st.builds(
    KVLayout,
    regions=st.lists(regions, max_size=3).map(tuple),
    block_size_tokens=st.lists(any_int, max_size=3).map(tuple),
    window_tokens=st.lists(any_int, max_size=3).map(tuple),
    memory_kind=ids,
    device_id=any_int,
    model=ids,
    dtype=ids,
    num_kv_heads=any_int,
    head_dim=any_int,
    axis_order=ids,
    packing=ids,
    tp_size=any_int,
    tp_rank=any_int,
    pp_size=any_int,
    pp_rank=any_int,
)
hellos = st.builds(Hello, any_int, ids, counts, ids, st.binary(max_size=30), layouts)
seconds = st.floats(0, 86400, exclude_min=True)
reasons = st.text(st.characters(exclude_categories=["Cs"]).filter(str.isprintable), max_size=30)
side: st.SearchStrategy[SideMessage] = st.one_of(
    st.builds(
        Register,
        ids,
        ids,
        ids,
        st.sampled_from(Direction),
        counts,
        counts,
        blocks,
        seconds,
        st.integers(1, 4096),
        st.none() | hellos,
    ),
    st.builds(HelloWanted, ids),
    st.builds(Confirm, ids, st.integers(1, 1 << 40)),
    st.builds(Accepted, ids),
    st.builds(Offer, ids, counts, blocks, seconds, hellos),
    st.builds(SegmentPosted, ids),
    st.builds(Renew, ids, ids, counts, st.booleans(), counts),
    st.builds(Cancel, ids, ids, reasons, counts),
    st.builds(Ended, ids, ids, st.sampled_from(Outcome), reasons, counts),
    st.just(Connected()),
)
notifications: st.SearchStrategy[Notification] = st.just(Greeting()) | st.builds(
    SegmentLanded, ids, counts, counts, st.booleans(), counts
)


@given(side)
def test_side_channel_messages_survive_the_trip(message: SideMessage) -> None:
    assert decode_side(encode(message)) == message


@given(notifications)
def test_notifications_survive_the_trip(message: Notification) -> None:
    assert decode_notification(encode(message)) == message


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_decode_or_are_refused(data: bytes) -> None:
    for decode in (decode_side, decode_notification):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@given(side | notifications, st.data())
def test_a_message_damaged_anywhere_decodes_or_is_refused(
    message: SideMessage | Notification, data: st.DataObject
) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        cut = data.draw(st.integers(at, min(len(damaged), at + 2)))
        damaged[at:cut] = data.draw(st.binary(max_size=3))
        if not damaged:
            break
    for decode in (decode_side, decode_notification):
        with contextlib.suppress(RemoteProtocolError):
            decode(bytes(damaged))


json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=4)
)
# Half the keys are ours, so that values are looked at and not only keys; JSON can spell halves of surrogate pairs.
json_texts = st.text() | st.text(st.characters(categories=["Cs"]), max_size=2)
params = st.dictionaries(st.sampled_from(_Wire.__struct_fields__) | json_texts, json_values | json_texts)
plausible = st.fixed_dictionaries(
    {},
    optional={
        "do_remote_decode": st.booleans(),
        "do_remote_prefill": st.booleans(),
        "transfer_id": json_texts | st.none(),
        "remote_engine_id": json_texts | st.none(),
        "remote_request_id": json_texts | st.sampled_from(("-00000000", "r-00000000")) | st.none(),
        "remote_host": json_texts | st.none(),
        "remote_port": st.integers(0, 70000) | st.none(),
        "remote_block_ids": st.lists(st.integers() | st.lists(st.integers(), max_size=3), max_size=3) | st.none(),
        "remote_num_tokens": st.integers() | st.none(),
        "tp_size": st.integers(0, 5000),
    },
)


@given(params | plausible, json_texts)
def test_params_give_a_ticket_or_nothing_or_are_refused(params: dict[str, Json], request_id: str) -> None:
    """And a ticket can be sent: what it names fits into a message."""
    try:
        ticket = parse_params(json.loads(json.dumps(params)), RequestId(request_id))
    except InvalidParams:
        return
    if isinstance(ticket, PrefillTicket):
        assert decode_side(encode(Renew(ticket.transfer_id, "i")))
    elif isinstance(ticket, DecodeTicket):
        register = Register(ticket.transfer_id, ticket.engine_id, "i", ticket.direction, 0, 1, ((1,),), 1.0)
        assert decode_side(encode(register)) == register


SANE = st.builds(
    Region,
    st.sampled_from(("a", "b")),
    st.integers(0, 1),
    st.integers(1, 64) | st.integers((1 << 63) - 2, 1 << 64),
    st.integers(1, 64) | st.integers((1 << 63) - 2, 1 << 64),
    st.integers(1, 64) | st.integers((1 << 63) - 2, 1 << 64),
    st.sampled_from((1, 2, 16)),
    st.just(1),
    st.just(1),
    st.integers(1, 64) | st.integers((1 << 63) - 2, 1 << 64),
    st.tuples(
        st.builds(Part, st.integers(0, 64), st.just(1), *[st.integers(1, 64) | st.integers((1 << 63) - 2, 1 << 64)] * 4)
    ),
)
tokens = st.integers(0, 64) | st.integers((1 << 62), 1 << 70)


@given(
    layouts | st.lists(SANE, min_size=1, max_size=3).map(lambda found: _sane(tuple(found))),
    blocks,
    blocks,
    tokens,
    tokens,
)
def test_a_peers_layout_is_refused_or_can_be_addressed(
    layout: KVLayout, ours: object, theirs: object, first_token: int, num_tokens: int
) -> None:
    """Found: a stride or a device that fits msgpack but not an address table ended the transfer thread."""
    try:
        layout.validate()
        mapping = map_layouts(layout, layout, End.SOURCE)
    except (RemoteProtocolError, Incompatible):
        return
    with contextlib.suppress(RemoteProtocolError):
        found = describe(
            mapping,
            ours,  # type: ignore[arg-type]
            theirs,  # type: ignore[arg-type]
            first_token=first_token,
            end_token=num_tokens,
            num_tokens=num_tokens,
        )
        assert (found.our_address > 0).all()
        assert (found.length_bytes > 0).all()


def _sane(regions: tuple[Region, ...]) -> KVLayout:
    return KVLayout(
        regions=regions,
        block_size_tokens=(16, 16),
        window_tokens=(0, 8),
        memory_kind="DRAM",
        device_id=0,
        model="m",
        dtype="d",
        num_kv_heads=1,
        head_dim=1,
        axis_order="LBNHC",
        packing="",
        tp_size=1,
        tp_rank=0,
        pp_size=1,
        pp_rank=0,
    )


def test_every_message_of_the_module_is_generated_here() -> None:
    structs = {
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == messages.__name__
    }
    assert structs == {*SideMessage.__args__, *Notification.__args__, Hello}
