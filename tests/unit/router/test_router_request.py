from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.router.answers import Answer
from kvbaton.router.request import Api, ClientRequest, DecodeOnly, parse_request

TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def parse(body: dict[str, Any] | bytes, api: Api = Api.COMPLETIONS) -> ClientRequest | Answer:
    return parse_request(api, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"model": "m", "prompt": "x"} x', "invalid_json", None),
        (b'{"model": "m", "prompt": "x", "top_p": NaN}', "invalid_json", None),
        (b'{"model": "m", "prompt": "\\ud800"}', "invalid_json", None),
        (b'{"model": "m", "prompt": "\xff"}', "invalid_json", None),
        (b'{"model": "m", "prompt": "x", "\xff": 1}', "invalid_json", None),
        (b"[]", "invalid_body", None),
        (b'"x"', "invalid_body", None),
        (b"null", "invalid_body", None),
        (b'{"prompt": "x"}', "missing_field", "model"),
        (b'{"model": "m"}', "missing_field", "prompt"),
        (b'{"model": "m", "prompt": null}', "missing_field", "prompt"),
        (b'{"model": 3, "prompt": "x"}', "invalid_type", "model"),
        (b'{"model": null, "prompt": "x"}', "invalid_type", "model"),
        (b'{"model": "", "prompt": "x"}', "invalid_type", "model"),
        (b'{"model": "m", "prompt": 3}', "invalid_type", "prompt"),
        (b'{"model": "m", "prompt": {}}', "invalid_type", "prompt"),
        (b'{"model": "m", "prompt": []}', "invalid_type", "prompt"),
        (b'{"model": "m", "prompt": ["a", {}]}', "invalid_type", "prompt[1]"),
        (b'{"model": "m", "prompt": "x", "max_tokens": "8"}', "invalid_type", "max_tokens"),
        (b'{"model": "m", "prompt": "x", "max_tokens": -1}', "invalid_type", "max_tokens"),
        (b'{"model": "m", "prompt": "x", "max_tokens": 1.5}', "invalid_type", "max_tokens"),
        (b'{"model": "m", "prompt": "x", "max_tokens": true}', "invalid_type", "max_tokens"),
        (b'{"model": "m", "prompt": "x", "stream": "yes"}', "invalid_type", "stream"),
        (b'{"model": "m", "prompt": "x", "n": "2"}', "invalid_type", "n"),
    ],
)
def test_bad_completions(body: bytes, code: str, param: str | None) -> None:
    answer = parse(body)
    assert isinstance(answer, Answer)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["param"]) == (400, code, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": None}, "messages"),
        ({"max_completion_tokens": "8"}, "max_completion_tokens"),
    ],
)
def test_bad_chats(extra: dict[str, Any], param: str) -> None:
    answer = parse({**CHAT, **extra}, Api.CHAT)
    assert isinstance(answer, Answer)
    assert json.loads(answer.body)["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "api", "reason"),
    [
        (TEXT, Api.COMPLETIONS, None),
        ({**TEXT, "prompt": ["x"]}, Api.COMPLETIONS, None),
        ({**TEXT, "prompt": [1, 2, 3]}, Api.COMPLETIONS, None),
        ({**TEXT, "prompt": [[1, 2, 3]]}, Api.COMPLETIONS, None),
        ({**TEXT, "n": 1, "best_of": None, "stream": None, "max_tokens": None}, Api.COMPLETIONS, None),
        ({**TEXT, "echo": True}, Api.COMPLETIONS, None),
        ({**TEXT, "logprobs": 3, "echo": False}, Api.COMPLETIONS, None),
        ({**TEXT, "prompt_logprobs": None, "truncate_prompt_tokens": None}, Api.COMPLETIONS, None),
        ({**TEXT, "prompt": ["x", "y"]}, Api.COMPLETIONS, DecodeOnly.SEVERAL_PROMPTS),
        ({**TEXT, "prompt": [[1], [2]]}, Api.COMPLETIONS, DecodeOnly.SEVERAL_PROMPTS),
        ({**TEXT, "n": 2}, Api.COMPLETIONS, DecodeOnly.SEVERAL_CHOICES),
        ({**TEXT, "best_of": 2}, Api.COMPLETIONS, DecodeOnly.SEVERAL_CHOICES),
        ({**TEXT, "use_beam_search": True}, Api.COMPLETIONS, DecodeOnly.BEAM_SEARCH),
        ({**TEXT, "prompt_logprobs": 0}, Api.COMPLETIONS, DecodeOnly.PROMPT_LOGPROBS),
        ({**TEXT, "echo": True, "logprobs": 0}, Api.COMPLETIONS, DecodeOnly.PROMPT_LOGPROBS),
        ({**TEXT, "truncate_prompt_tokens": -1}, Api.COMPLETIONS, DecodeOnly.TRUNCATION),
        ({**TEXT, "max_tokens": 0, "echo": True}, Api.COMPLETIONS, DecodeOnly.NO_GENERATION),
        ({"model": "m", "prompt_embeds": "AAAA"}, Api.COMPLETIONS, DecodeOnly.PROMPT_EMBEDS),
        (CHAT, Api.CHAT, None),
        ({**CHAT, "echo": True, "logprobs": True, "top_logprobs": 2}, Api.CHAT, None),
        ({**CHAT, "n": 3}, Api.CHAT, DecodeOnly.SEVERAL_CHOICES),
        ({**CHAT, "prompt_logprobs": 1}, Api.CHAT, DecodeOnly.PROMPT_LOGPROBS),
        ({**CHAT, "max_completion_tokens": 0}, Api.CHAT, DecodeOnly.NO_GENERATION),
    ],
)
def test_what_a_transfer_cannot_serve(body: dict[str, Any], api: Api, reason: DecodeOnly | None) -> None:
    request = parse(body, api)
    assert isinstance(request, ClientRequest)
    assert request.decode_only is reason
    assert request.model == "m"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_NAMES = ("model", "prompt", "messages", "n", "stream", "max_tokens", "echo", "logprobs", "vllm_xargs")


@given(st.dictionaries(st.sampled_from(_NAMES) | st.text(), _json), st.sampled_from(Api))
def test_any_object_is_parsed_or_refused(body: dict[str, Any], api: Api) -> None:
    request = parse(body, api)
    if isinstance(request, Answer):
        assert request.status == 400
        assert set(json.loads(request.body)["error"]) == {"message", "type", "param", "code"}
    else:
        assert {name: json.loads(bytes(value)) for name, value in request.fields.items()} == body


@given(st.binary(max_size=60), st.sampled_from(Api))
def test_any_bytes_are_refused(body: bytes, api: Api) -> None:
    answer = parse_request(api, body)
    assert isinstance(answer, Answer)
    assert answer.status == 400
