"""PURE. A client's JSON body, checked just enough to route it.

Invariant: only the fields that routing needs are decoded; every value travels on as the bytes the client wrote
(`msgspec.Raw`), so a long prompt is neither parsed twice nor changed. What a KV transfer cannot serve is named by a
`DecodeOnly` reason and goes to D alone. Read next: `legs.py`.

Why each reason:

| reason | because |
|---|---|
| several_prompts | one HTTP request becomes several engine requests; a transfer id names one |
| several_choices | n or best_of > 1: D would start n requests with one transfer id |
| beam_search | the same, at every step |
| prompt_logprobs | prompt_logprobs, or echo with logprobs: they need D to run the prompt itself |
| prompt_embeds | not tokens; P and D cannot agree on what is cached |
| truncation | vLLM's limit depends on max_tokens, which P gets changed: P and D could run different prompts |
| no_generation | max_tokens 0 asks for nothing to decode |
"""

from __future__ import annotations

import enum
import re
from typing import Annotated

import msgspec

from kvbaton.router.answers import Answer, rejection

Fields = dict[str, msgspec.Raw]
"""A JSON object's members, their values still encoded."""


class Api(enum.Enum):
    """The routed endpoints; the value is the path, here and on the engines."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class DecodeOnly(enum.Enum):
    SEVERAL_PROMPTS = "several_prompts"
    SEVERAL_CHOICES = "several_choices"
    BEAM_SEARCH = "beam_search"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PROMPT_EMBEDS = "prompt_embeds"
    TRUNCATION = "truncation"
    NO_GENERATION = "no_generation"
    NO_PREFILL = "no_prefill"
    """The router has no P at all; decided by the shell."""


class ClientRequest(msgspec.Struct, frozen=True):
    api: Api
    model: str
    fields: Fields
    decode_only: DecodeOnly | None


NULL = msgspec.Raw(b"null")
Count = Annotated[int, msgspec.Meta(ge=0)]


class _EveryApi(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    max_tokens: Count | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: msgspec.Raw = NULL
    truncate_prompt_tokens: msgspec.Raw = NULL


class _Completion(_EveryApi):
    prompt: Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1)] | str | None = None
    prompt_embeds: msgspec.Raw = NULL
    echo: bool | None = None
    logprobs: msgspec.Raw = NULL


class _Chat(_EveryApi, kw_only=True):
    messages: Annotated[list[dict[str, msgspec.Raw]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None


_FIELDS = msgspec.json.Decoder(Fields)
_COMPLETION = msgspec.json.Decoder(_Completion)
_CHAT = msgspec.json.Decoder(_Chat)


def parse_request(api: Api, body: bytes) -> ClientRequest | Answer:
    """The request, or the 400 to answer with."""
    try:
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError:
        return rejection(400, "The request body must be a JSON object.", code="invalid_body")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return rejection(400, f"The request body is not valid JSON: {error}", code="invalid_json")
    try:
        seen: _Completion | _Chat = _COMPLETION.decode(body) if api is Api.COMPLETIONS else _CHAT.decode(body)
    except msgspec.ValidationError as error:
        return _wrong_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return rejection(400, f"The request body is not valid JSON: {error}", code="invalid_json")
    if isinstance(seen, _Completion) and seen.prompt is None and is_null(seen.prompt_embeds):
        return rejection(400, "A completion needs a `prompt`.", code="missing_field", param="prompt")
    return ClientRequest(api=api, model=seen.model, fields=fields, decode_only=_decode_only(seen))


def _decode_only(seen: _Completion | _Chat) -> DecodeOnly | None:
    limits = (seen.max_tokens, seen.max_completion_tokens if isinstance(seen, _Chat) else None)
    embeds = isinstance(seen, _Completion) and not is_null(seen.prompt_embeds)
    found = (
        (embeds, DecodeOnly.PROMPT_EMBEDS),
        (isinstance(seen, _Completion) and _has_several_prompts(seen.prompt), DecodeOnly.SEVERAL_PROMPTS),
        (bool(seen.use_beam_search), DecodeOnly.BEAM_SEARCH),
        (max(seen.n or 1, seen.best_of or 1) > 1, DecodeOnly.SEVERAL_CHOICES),
        (_wants_prompt_logprobs(seen), DecodeOnly.PROMPT_LOGPROBS),
        (not is_null(seen.truncate_prompt_tokens), DecodeOnly.TRUNCATION),
        (0 in limits, DecodeOnly.NO_GENERATION),
    )
    return next((reason for is_so, reason in found if is_so), None)


def _has_several_prompts(prompt: str | list[str | int | list[int]] | None) -> bool:
    # A list of integers is one tokenised prompt.
    return isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt)


def _wants_prompt_logprobs(seen: _Completion | _Chat) -> bool:
    if not is_null(seen.prompt_logprobs):
        return True
    return isinstance(seen, _Completion) and bool(seen.echo) and not is_null(seen.logprobs)


def is_null(value: msgspec.Raw) -> bool:
    return bytes(value).strip() == b"null"


_MISSING = re.compile(r"missing required field `(\w+)`")
_AT = re.compile(r" - at `\$\.?([^`]*)`$")


def _wrong_field(problem: str) -> Answer:
    """OpenAI's shape has a place for what msgspec expected, and one for where."""
    if missing := _MISSING.search(problem):
        name = missing.group(1)
        return rejection(400, f"The field `{name}` is required.", code="missing_field", param=name)
    at = _AT.search(problem)
    param = at.group(1) if at else None
    message = _AT.sub("", problem)
    return rejection(400, f"`{param}`: {message}." if param else message, code="invalid_type", param=param)
