"""The ticket on HTTP: who is asked for what, in which direction, and which mistakes are named."""

from __future__ import annotations

import pytest

from kvbaton.errors import InvalidParams
from kvbaton.protocol.params import DecodeTicket, PrefillIdentity, PrefillTicket, parse_params, prefill_answer
from kvbaton.types import Direction, EngineId, RequestId, TransferId

RID = RequestId("cmpl-abc-0-12345678")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine",
    "remote_host": "127.0.0.1",
    "remote_port": 5555,
    "transfer_id": "t",
}
IDENTITY = PrefillIdentity(engine_id=EngineId("engine"), host="127.0.0.1", port=5555, tp_size=2, pp_size=1)


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False}, {"foreign": 1}])
def test_params_may_ask_for_nothing(params: dict[str, object]) -> None:
    assert parse_params(params, RID) is None


def test_the_prefill_leg_as_in_tree_routers_send_it() -> None:
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    assert parse_params(PREFILL | nulls, RID) == PrefillTicket(TransferId("t"))


def test_a_prefill_may_be_to_learn_who_the_engine_is() -> None:
    assert parse_params(PREFILL | {"identity_only": True}, RID) == PrefillTicket(TransferId("t"), is_identity_only=True)


def test_without_block_ids_the_decode_leg_is_a_push() -> None:
    assert parse_params(DECODE, RID) == DecodeTicket(
        TransferId("t"), EngineId("engine"), "127.0.0.1", 5555, 1, 1, Direction.PUSH
    )


@pytest.mark.parametrize("blocks", [[], [[1, 2]], [[1], [2]], [1, 2]])
def test_with_block_ids_the_decode_leg_is_a_pull(blocks: list[object]) -> None:
    ticket = parse_params(DECODE | {"remote_block_ids": blocks}, RID)
    assert isinstance(ticket, DecodeTicket)
    assert ticket.direction is Direction.PULL


@pytest.mark.parametrize(
    ("given", "transfer_id"),
    [
        ({"transfer_id": "t", "remote_request_id": "r"}, "t"),
        ({"transfer_id": None, "remote_request_id": "cmpl-r-deadbeef"}, "cmpl-r"),
        ({"transfer_id": None}, "cmpl-abc-0"),
    ],
)
def test_legs_without_a_transfer_id_pair_by_request_id(given: dict[str, object], transfer_id: str) -> None:
    ticket = parse_params(DECODE | given, RID)
    assert isinstance(ticket, DecodeTicket)
    assert ticket.transfer_id == transfer_id


def test_only_a_suffix_of_eight_hexadecimal_digits_is_the_engines() -> None:
    plain = PREFILL | {"transfer_id": None}
    for request_id in ("a-1234567", "a-1234567g", "a-123456789"):
        assert parse_params(plain, RequestId(request_id)) == PrefillTicket(TransferId(request_id))
    assert parse_params(plain, RequestId("a-b-0000000f")) == PrefillTicket(TransferId("a-b"))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (PREFILL | {"do_remote_prefill": True}, "both true"),
        (PREFILL | {"do_remote_decode": "yes"}, "do_remote_decode"),
        (PREFILL | {"identity_only": 1}, "identity_only"),
        (DECODE | {"identity_only": True}, "identity_only"),
        ({"identity_only": True}, "identity_only"),
        (PREFILL | {"transfer_id": 7}, "transfer_id"),
        (PREFILL | {"transfer_id": ""}, "transfer_id"),
        (PREFILL | {"transfer_id": "x" * 513}, "transfer_id"),
        (DECODE | {"remote_port": 0}, "remote_port"),
        (DECODE | {"remote_port": 65536}, "remote_port"),
        (DECODE | {"remote_port": "5555"}, "remote_port"),
        (DECODE | {"remote_block_ids": [[-1]]}, "remote_block_ids"),
        (DECODE | {"tp_size": 0}, "tp_size"),
        (DECODE | {"transfer_mode": "sideways"}, "transfer_mode"),
        (DECODE | {"remote_engine_id": None}, "remote_engine_id missing"),
        (DECODE | {"remote_host": None, "remote_port": None}, "remote_host, remote_port missing"),
        (DECODE | {"remote_blocks_ids": [[1]]}, "Did you mean 'remote_block_ids'"),
        ({"do_remote_decoded": True}, "Did you mean 'do_remote_decode'"),
        # Found: JSON can spell half a surrogate pair, which ended the transfer thread when it was to be sent.
        ({"do_remote_decode": "\ud800"}, "surrogates not allowed"),
        (PREFILL | {"transfer_id": "\ud800"}, "not valid Unicode"),
        (DECODE | {"transfer_id": "\ud800"}, "not valid Unicode"),
        (DECODE | {"remote_host": "\udfff"}, "not valid Unicode"),
        (DECODE | {"remote_engine_id": "\udfff"}, "not valid Unicode"),
        # Found: the peer drops a registration without transfer id, and the request waited for its deadline.
        (DECODE | {"transfer_id": None, "remote_request_id": "-00000000"}, "transfer_id missing"),
    ],
)
def test_a_mistake_is_refused_by_name(params: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidParams, match=named):
        parse_params(params, RID)


def test_a_request_id_too_long_to_pair_by_is_refused() -> None:
    with pytest.raises(InvalidParams, match="one of 600 characters"):
        parse_params(PREFILL | {"transfer_id": None}, RequestId("x" * 600))


def test_the_answer_is_what_a_decode_engine_accepts() -> None:
    answer = prefill_answer(PrefillTicket(TransferId("t")), IDENTITY, RequestId("r-12345678"), ([1, 2], [3]), 40)
    assert parse_params(answer, RID) == DecodeTicket(
        TransferId("t"), EngineId("engine"), "127.0.0.1", 5555, 2, 1, Direction.PULL
    )
    assert answer["remote_block_ids"] == [[1, 2], [3]]
    assert answer["remote_num_tokens"] == 40
