"""PURE. What each engine is sent for one dispatch, and what is read from P's answer.

Invariant: both legs run the same prompt. P's leg is the client's request cut down to one token that nobody reads, by
the table below; fields not in it are passed on, because chat templates, tools, documents, salts and the like shape
the prompt. D's leg is the client's request. Neither leg carries anything of the client's that steers transfers. Read
next: `flow.py`.

| field on P's leg | becomes | because |
|---|---|---|
| stream; stream_options, stream_interval | false; dropped | P's answer is one JSON object with the params |
| max_tokens | 1 | P only prefills |
| max_completion_tokens (chat) | 1 if present | it wins over max_tokens |
| min_tokens | dropped | vLLM refuses more than max_tokens |
| n, best_of, use_beam_search, length_penalty | dropped | one request, one transfer (larger values never get here) |
| stop, stop_token_ids, include_stop_str_in_output | dropped | P must end by length, or its blocks may not be kept |
| ignore_eos | true | the same |
| *logprobs, logprob_token_ids | dropped | costs work; prompt_logprobs turns P's prefix cache off |
| echo, return_* | dropped | answer text that nobody reads |
| structured_outputs, guided_* | dropped | a grammar to compile before prefill may start |
| response_format | dropped; **kept for chat** | the same; but some chat templates put it into the prompt |
| thinking_token_budget, repetition_detection, bad_words | dropped | output only; some need flags P may lack |
| tool_choice, tools, reasoning_effort, chat_template*, documents, ... | kept | they shape the prompt |
| cache_salt, priority, add_special_tokens, mm_processor_kwargs | kept | prompt, or order |
| temperature, top_p, seed, penalties, logit_bias | kept | harmless, and checked alike on both sides |

| field on both legs | becomes | because |
|---|---|---|
| kv_transfer_params, ec_transfer_params, also in vllm_xargs | ours, or dropped | a client must not name peers |
| request_id | dropped | engines take ours from X-Request-Id |
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvbaton.router.request import NULL, Api, ClientRequest, Fields, is_null
from kvbaton.types import EngineId, TransferId

STEERING = frozenset({"kv_transfer_params", "ec_transfer_params", "request_id"})

_PREFILL_DROPS = frozenset(
    {
        "stream_options", "stream_interval", "min_tokens", "n", "best_of", "use_beam_search", "length_penalty",
        "stop", "stop_token_ids", "include_stop_str_in_output",
        "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids",
        "echo", "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "return_token_offsets",
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_decoding_backend", "guided_whitespace_pattern",
        "thinking_token_budget", "repetition_detection", "bad_words",
    }
)  # fmt: skip
PREFILL_DROPS: dict[Api, frozenset[str]] = {
    Api.COMPLETIONS: _PREFILL_DROPS | {"response_format"},
    Api.CHAT: _PREFILL_DROPS,
}

_TRUE, _FALSE, _ONE = msgspec.Raw(b"true"), msgspec.Raw(b"false"), msgspec.Raw(b"1")


class Ticket(msgspec.Struct, frozen=True):
    """The ids of one dispatch: `transfer_id` is new for each, `request_id` is shared by all dispatches of a request."""

    request_id: str
    transfer_id: TransferId


class Identity(msgspec.Struct, frozen=True):
    """Where a P's KV is reached: what a push's D must know before P has answered."""

    remote_engine_id: EngineId
    remote_host: str
    remote_port: int
    tp_size: int
    pp_size: int


class PrefillAnswer(msgspec.Struct, frozen=True):
    """P's params: as they came, for pull; and the identity in them, for push."""

    params: msgspec.Raw
    identity: Identity


def prefill_body(request: ClientRequest, ticket: Ticket) -> bytes:
    """P's leg: the same prompt, one token, and the promise to keep the blocks."""
    drops = PREFILL_DROPS[request.api]
    fields = {name: value for name, value in _without_steering(request.fields).items() if name not in drops}
    fields.update(stream=_FALSE, max_tokens=_ONE, ignore_eos=_TRUE)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    fields["kv_transfer_params"] = _prefill_params(ticket)
    return msgspec.json.encode(fields)


def decode_body(request: ClientRequest, params: msgspec.Raw | None) -> bytes:
    """D's leg: the client's request, with the transfer's params if there is a transfer."""
    fields = _without_steering(request.fields)
    if params is not None:
        fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)


def push_params(identity: Identity, ticket: Ticket) -> msgspec.Raw:
    """D's params when P writes. No `remote_block_ids`: their absence says push."""
    fields = {
        **msgspec.structs.asdict(identity),
        "remote_request_id": ticket.request_id,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": ticket.transfer_id,
    }
    return msgspec.Raw(msgspec.json.encode(fields))


def warm_up_body(model: str, ticket: Ticket) -> bytes:
    """The smallest prefill there is; its answer tells P's identity.

    Our connector holds nothing for it. An in-tree one does not know `identity_only`, and keeps the one block until its
    lease ends, once per (re)start of a P.
    """
    fields = {
        "model": model,
        "prompt": [0],  # token ids: any tokeniser has a 0, and no text is turned into several tokens
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        "kv_transfer_params": _prefill_params(ticket, identity_only=True),
    }
    return msgspec.json.encode(fields)


class _Params(msgspec.Struct):
    remote_engine_id: Annotated[str, msgspec.Meta(min_length=1)]
    remote_host: Annotated[str, msgspec.Meta(min_length=1)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tp_size: Annotated[int, msgspec.Meta(ge=1)]
    pp_size: Annotated[int, msgspec.Meta(ge=1)] = 1  # in-tree connectors before pipeline-parallel P leave it out


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = NULL


def read_prefill_answer(body: bytes) -> PrefillAnswer | str:
    """What P's 200 says of the transfer, or what is wrong with it.

    A missing or partial identity must stop here: D's engine would recompute silently, or die of the missing key.
    """
    try:
        raw = msgspec.json.decode(body, type=_PrefillReply).kv_transfer_params
        if is_null(raw):
            return "it answered without kv_transfer_params; start it with a KV connector (--kv-transfer-config)"
        seen = msgspec.json.decode(raw, type=_Params)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"its answer's kv_transfer_params cannot be used ({error})"
    identity = Identity(
        remote_engine_id=EngineId(seen.remote_engine_id),
        remote_host=seen.remote_host,
        remote_port=seen.remote_port,
        tp_size=seen.tp_size,
        pp_size=seen.pp_size,
    )
    return PrefillAnswer(params=raw.copy(), identity=identity)


def _prefill_params(ticket: Ticket, *, identity_only: bool = False) -> msgspec.Raw:
    fields: dict[str, object] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": ticket.transfer_id,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    if identity_only:
        fields["identity_only"] = True
    return msgspec.Raw(msgspec.json.encode(fields))


def _without_steering(fields: Fields) -> Fields:
    kept = {name: value for name, value in fields.items() if name not in STEERING}
    if "vllm_xargs" in kept:  # vLLM merges it into the very dictionary that holds the params
        try:
            extra = msgspec.json.decode(kept["vllm_xargs"], type=Fields)
        except msgspec.ValidationError:
            return kept  # null, or something the engine will refuse
        kept["vllm_xargs"] = msgspec.Raw(
            msgspec.json.encode({name: value for name, value in extra.items() if name not in STEERING})
        )
    return kept
