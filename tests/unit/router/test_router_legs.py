from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.protocol.params import PrefillTicket, parse_params
from kvbaton.router.legs import (
    PREFILL_DROPS,
    STEERING,
    Identity,
    PrefillAnswer,
    Ticket,
    decode_body,
    prefill_body,
    push_params,
    read_prefill_answer,
    warm_up_body,
)
from kvbaton.router.request import Api, ClientRequest, parse_request
from kvbaton.types import EngineId, RequestId, TransferId

TICKET = Ticket(request_id="req", transfer_id=TransferId("xfer"))
IDENTITY = Identity(EngineId("e"), "h", 5600, 2, 1)
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def request(body: dict[str, Any], api: Api = Api.COMPLETIONS) -> ClientRequest:
    parsed = parse_request(api, json.dumps(body).encode())
    assert isinstance(parsed, ClientRequest)
    return parsed


def test_prefill_leg_by_the_table() -> None:
    full = {
        **CHAT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 100,
        "max_completion_tokens": 100,
        "min_tokens": 10,
        "n": 1,
        "stop": ["a"],
        "stop_token_ids": [1],
        "ignore_eos": False,
        "logprobs": True,
        "top_logprobs": 3,
        "structured_outputs": {"regex": "a"},
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"a": 1},
        "documents": [{"title": "t"}],
        "cache_salt": "s",
        "priority": 3,
        "temperature": 0.7,
    }
    sent = json.loads(prefill_body(request(full, Api.CHAT), TICKET))
    assert sent == {
        **CHAT,
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "ignore_eos": True,
        "response_format": {"type": "json_object"},  # some chat templates show it to the model
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"a": 1},
        "documents": [{"title": "t"}],
        "cache_salt": "s",
        "priority": 3,
        "temperature": 0.7,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "xfer",
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_response_format_is_dropped_for_completions_only() -> None:
    body = {**TEXT, "response_format": {"type": "json_object"}}
    assert "response_format" not in json.loads(prefill_body(request(body), TICKET))
    assert "response_format" in json.loads(decode_body(request(body), None))


def test_decode_leg_is_the_clients_request_with_our_params() -> None:
    body = {**TEXT, "stream": True, "max_tokens": 7, "kv_transfer_params": {"evil": 1}, "request_id": "mine"}
    kept = {**TEXT, "stream": True, "max_tokens": 7}
    assert json.loads(decode_body(request(body), None)) == kept
    assert json.loads(decode_body(request(body), push_params(IDENTITY, TICKET))) == {
        **kept,
        "kv_transfer_params": {
            "remote_engine_id": "e",
            "remote_host": "h",
            "remote_port": 5600,
            "tp_size": 2,
            "pp_size": 1,
            "remote_request_id": "req",
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": "xfer",
        },
    }


@pytest.mark.parametrize("extra", [None, 3, "x", [1]])
def test_xargs_that_are_no_object_are_the_engines_affair(extra: object) -> None:
    sent = json.loads(decode_body(request({**TEXT, "vllm_xargs": extra}), None))
    assert sent["vllm_xargs"] == extra


_steering = st.dictionaries(st.sampled_from(sorted(STEERING)), st.text() | st.integers())
_extra = st.dictionaries(
    st.sampled_from(sorted(PREFILL_DROPS[Api.COMPLETIONS])) | st.text(min_size=1),
    st.text() | st.integers() | st.none(),
)


@given(extra=_extra, steering=_steering, api=st.sampled_from(Api))
def test_both_legs_run_the_same_prompt_and_carry_no_steering(
    extra: dict[str, Any], steering: dict[str, Any], api: Api
) -> None:
    base = TEXT if api is Api.COMPLETIONS else CHAT
    body = {**extra, **steering, "vllm_xargs": {**steering, "keep": 1}, **base}
    parsed = parse_request(api, json.dumps(body).encode())
    if not isinstance(parsed, ClientRequest):
        return  # one of the extra fields has a wrong type
    to_p, to_d = json.loads(prefill_body(parsed, TICKET)), json.loads(decode_body(parsed, None))
    own = {"stream", "max_tokens", "ignore_eos", "max_completion_tokens", "kv_transfer_params"}
    for name, value in to_d.items():
        if name not in PREFILL_DROPS[api] | own:
            assert to_p[name] == value
    assert not PREFILL_DROPS[api] & set(to_p)
    assert (to_p["stream"], to_p["max_tokens"], to_p["ignore_eos"]) == (False, 1, True)
    assert to_p["kv_transfer_params"]["transfer_id"] == "xfer"
    assert "identity_only" not in to_p["kv_transfer_params"]
    assert not STEERING & set(to_d)
    assert to_d["vllm_xargs"] == to_p["vllm_xargs"] == {"keep": 1}


def test_warm_up() -> None:
    sent = json.loads(warm_up_body("m", TICKET))
    assert (sent["model"], sent["prompt"], sent["max_tokens"], sent["stream"]) == ("m", [0], 1, False)
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    # Found: without this, P held a block for it until the lease ended, and counted a request that nobody fetched.
    ticket = parse_params(sent["kv_transfer_params"], RequestId("r"))
    assert ticket == PrefillTicket(TICKET.transfer_id, is_identity_only=True)


PARAMS: dict[str, Any] = {
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 5600,
    "tp_size": 2,
    "pp_size": 1,
    "remote_block_ids": [[1, 2]],
}


def test_prefill_answer_is_read_and_kept_as_it_came() -> None:
    raw = b'{ "remote_engine_id":"e", "remote_host": "h","remote_port":5600, "tp_size":2, "later_field":[1.0] }'
    answer = read_prefill_answer(b'{"choices": [], "kv_transfer_params": ' + raw + b"}")
    assert isinstance(answer, PrefillAnswer)
    assert answer.identity == IDENTITY
    assert bytes(answer.params) == raw
    assert msgspec.json.encode({"p": answer.params}) == b'{"p":' + raw + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": 3}',
        b'{"kv_transfer_params": "\xff"}',
        *(
            json.dumps({"kv_transfer_params": {**PARAMS, name: value}}).encode()
            for name, value in [
                ("remote_engine_id", None),
                ("remote_engine_id", ""),
                ("remote_host", None),
                ("remote_port", 0),
                ("remote_port", "5600"),
                ("tp_size", 0),
                ("pp_size", None),
            ]
        ),
    ],
)
def test_unusable_prefill_answers(body: bytes) -> None:
    assert isinstance(read_prefill_answer(body), str)
