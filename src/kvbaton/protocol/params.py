"""The typed form of `kv_transfer_params`, the ticket that rides on HTTP between P, router and D.

Parsed once per request, with every field checked; an invalid ticket fails that request and nothing else. The field names
are those of vLLM's in-tree NIXL connectors. The params decide the direction: `remote_block_ids` present means pull.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from kvbaton.errors import InvalidParams
from kvbaton.protocol.messages import PRINTABLE
from kvbaton.types import Direction, EngineId, RequestId, TransferId

MAX_TEXT_CHARACTERS = 512

Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Wire(msgspec.Struct, frozen=True):
    """Every key we obey, with its type. vLLM and other routers add keys of their own, which are let pass."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    identity_only: bool = False
    transfer_id: Text | None = None
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    remote_host: Text | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_block_ids: list[list[BlockId] | BlockId] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    transfer_mode: Literal["push", "pull"] | None = None


class PrefillTicket(msgspec.Struct, frozen=True):
    """This engine computes the prompt and hands its KV off."""

    transfer_id: TransferId
    is_identity_only: bool = False
    """Nobody is going to fetch it: the request is to learn who this engine is, and that it works."""


class DecodeTicket(msgspec.Struct, frozen=True):
    """This engine receives the prompt's KV. `host` and `port` are believed once the peer there proves to be `engine_id`."""

    transfer_id: TransferId
    engine_id: EngineId
    host: str
    port: int
    tp_size: int
    pp_size: int
    direction: Direction


def parse_params(params: Mapping[str, object], request_id: RequestId) -> PrefillTicket | DecodeTicket | None:
    """The ticket in `params`, or None where they ask for nothing.

    Without `transfer_id` the legs pair by `remote_request_id`, else by the request id less the engine's random suffix.
    Raises InvalidParams naming the field, also for an unknown one that is nearly a known one.
    """
    _refuse_misspelt(params)
    try:
        wire = msgspec.convert(dict(params), _Wire, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidParams(f"kv_transfer_params: {error}") from None
    if wire.do_remote_decode and wire.do_remote_prefill:
        raise InvalidParams("kv_transfer_params: do_remote_decode and do_remote_prefill are both true; set one of them")
    if wire.identity_only and not wire.do_remote_decode:
        raise InvalidParams("kv_transfer_params: identity_only is of a prefill request; set do_remote_decode too")
    if wire.do_remote_decode:
        transfer_id = TransferId(_sendable(wire.transfer_id or _without_suffix(request_id)))
        return PrefillTicket(transfer_id, wire.identity_only)
    if wire.do_remote_prefill:
        return _decode_ticket(wire, request_id)
    return None


def _refuse_misspelt(params: Mapping[str, object]) -> None:
    """A misspelt key would be let pass as a foreign one, and the request would quietly be served another way."""
    for key in params:
        close = difflib.get_close_matches(key, _Wire.__struct_fields__, n=1, cutoff=0.85)
        if close and key != close[0]:
            raise InvalidParams(f"kv_transfer_params: unknown field {key!r}. Did you mean {close[0]!r}?")


def _decode_ticket(wire: _Wire, request_id: RequestId) -> DecodeTicket:
    engine_id, host, port = wire.remote_engine_id, wire.remote_host, wire.remote_port
    if engine_id is None or host is None or port is None:
        needed = {"remote_engine_id": engine_id, "remote_host": host, "remote_port": port}
        missing = ", ".join(name for name, value in needed.items() if value is None)
        raise InvalidParams(
            f"kv_transfer_params: {missing} missing; a decode request needs the prefill engine's identity"
        )
    pairing = wire.transfer_id or _without_suffix(wire.remote_request_id or request_id)
    return DecodeTicket(
        transfer_id=TransferId(_sendable(pairing)),
        engine_id=EngineId(_sendable(engine_id)),
        host=_sendable(host),
        port=port,
        tp_size=wire.tp_size,
        pp_size=wire.pp_size,
        direction=Direction.PUSH if wire.remote_block_ids is None else Direction.PULL,
    )


def _sendable(text: str) -> str:
    """`text`, which a side-channel message can carry. JSON can spell half a surrogate pair; UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParams(f"kv_transfer_params: {text!r} is not valid Unicode") from None
    if not re.match(PRINTABLE, text):
        raise InvalidParams(f"kv_transfer_params: {text!r} has control characters")
    if not 0 < len(text) <= MAX_TEXT_CHARACTERS:
        raise InvalidParams(
            f"kv_transfer_params: transfer_id missing, and the request id leaves one of {len(text)} characters; "
            f"send a transfer_id of 1 to {MAX_TEXT_CHARACTERS}"
        )
    return text


def _without_suffix(request_id: str) -> str:
    """VLLM appends `-` and eight hexadecimal digits to every request id; the two engines' suffixes differ."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id)


class PrefillIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """How decode engines reach this engine, in the words of the params."""

    engine_id: EngineId
    host: str
    port: int
    tp_size: int
    pp_size: int


def identity_answer(identity: PrefillIdentity) -> dict[str, object]:
    """P's answer to who only asks for that: there is nothing to fetch."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": False,
        "remote_engine_id": identity.engine_id,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
    }


def prefill_answer(
    ticket: PrefillTicket,
    identity: PrefillIdentity,
    request_id: RequestId,
    blocks: tuple[list[int], ...],
    num_tokens: int,
) -> dict[str, object]:
    """P's answer: what the router passes to D, whole for a pull, without the block ids for a push."""
    return identity_answer(identity) | {
        "do_remote_prefill": True,
        "remote_request_id": request_id,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_num_tokens": num_tokens,
        "transfer_mode": "push",
        "transfer_id": ticket.transfer_id,
    }
