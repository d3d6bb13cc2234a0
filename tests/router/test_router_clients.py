"""The client's side: byte-exact streams, going away in each phase, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import openai
import pytest
from aiohttp import web

from kvbaton.types import Direction
from tests.router.conftest import StartRouter
from tests.router.scripted import (
    MODEL,
    PATIENCE_S,
    Router,
    ScriptedEngine,
    Seen,
    answer,
    complete_when_told,
    open_stream,
    prefill_when_told,
    reset,
    stream,
)

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
STREAM = {**BODY, "stream": True}


# -- bytes ---------------------------------------------------------------------------------------------------------


async def test_stream_is_byte_exact_and_unbuffered(router: Router, d: ScriptedEngine) -> None:
    """Pieces end inside a UTF-8 character and inside events; each is with the client before the next is sent."""
    text = 'data: {"text": "žluťoučký 🐎"}\r\n\r\n: comment\n\ndata: {"usage": {}}\n\ndata: [DONE]\n\n'.encode()
    cuts = [0, 17, 18, 24, 33, 34, 35, 50, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    got_piece = asyncio.Event()

    async def one_by_one(_: ScriptedEngine, __: Seen, request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for piece in pieces:
            got_piece.clear()
            await response.write(piece)
            async with asyncio.timeout(PATIENCE_S):
                await got_piece.wait()
        await response.write_eof()
        return response

    d.behaviour = one_by_one
    received: list[bytes] = []
    async with router.http.post(router.url + "/v1/completions", json=STREAM) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for chunk in response.content.iter_any():
            received.append(chunk)
            got_piece.set()
    assert received == pieces


async def test_plain_answer_is_byte_exact(router: Router, d: ScriptedEngine) -> None:
    body = b'{ "choices" : [ {"text":"\\u00e9 \xc3\xa9"} ],  "kv_transfer_params": null }\n'
    d.behaviour = answer(200, body)
    status, received, headers = await router.post(BODY)
    assert (status, received) == (200, body)
    assert headers["content-length"] == str(len(body))
    assert headers["x-engine"] == "yes"


async def test_prompt_bytes_reach_the_engines_as_they_are(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    raw = b'{"model":"tiny", "prompt" : "a\\u00e9\\ud83d\\ude00/\\/ \xc3\xa9", "top_p": 0.10, "seed": 12345678901234567890}'
    assert (await router.post(raw))[0] == 200
    for seen in (p.requests[0], d.requests[0]):
        assert b'"a\\u00e9\\ud83d\\ude00/\\/ \xc3\xa9"' in seen.raw
        assert b'"top_p":0.10' in seen.raw
        assert b"12345678901234567890" in seen.raw


async def test_large_body(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    prompt = "x" * (5 << 20)
    assert (await router.post({**BODY, "prompt": prompt}))[0] == 200
    assert p.requests[0].body["prompt"] == d.requests[0].body["prompt"] == prompt


# -- going away ----------------------------------------------------------------------------------------------------


async def _leaves(router: Router, *engines: ScriptedEngine) -> None:
    """A client comes, waits until these engines have its request, and closes its socket: they see it, all is zero."""
    numbers = [len(engine.requests) for engine in engines]
    _, writer = await router.open_raw(STREAM)
    seen = [await engine.request(number) for engine, number in zip(engines, numbers, strict=True)]
    await _close(writer)
    async with asyncio.timeout(PATIENCE_S):
        for one in seen:
            await one.closed.wait()
    now = await router.idle()
    assert now["requests"]["client_gone"] == 1
    assert not any(one["failed"] for one in (*now["prefill"], *now["decode"]))  # not the engines' fault


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_client_leaves_while_both_legs_run(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour, d.behaviour = prefill_when_told, complete_when_told
    await _leaves(router, p, d)


async def test_client_leaves_while_decode_waits(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    d.behaviour = complete_when_told
    await _leaves(router, d)


async def test_client_leaves_during_prefill_of_a_pull(start_router: StartRouter, p: ScriptedEngine) -> None:
    router = await start_router(direction=Direction.PULL)
    p.behaviour = prefill_when_told
    await _leaves(router, p)


async def test_client_leaves_during_decode_of_a_pull(start_router: StartRouter, d: ScriptedEngine) -> None:
    router = await start_router(direction=Direction.PULL)
    d.behaviour = stream(then="hold")
    await _leaves(router, d)


@pytest.mark.parametrize("is_prefill_pending", [True, False])
async def test_client_leaves_while_streaming(
    router: Router, p: ScriptedEngine, d: ScriptedEngine, *, is_prefill_pending: bool
) -> None:
    if is_prefill_pending:
        p.behaviour = prefill_when_told
    d.behaviour = stream(b"data: 1\n\n", then="hold")
    reader, writer = await router.open_raw(STREAM)
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"data: 1\n\n")
        await _close(writer)
        await d.requests[0].closed.wait()
        if is_prefill_pending:
            await p.requests[0].closed.wait()
    assert (await router.idle())["requests"]["client_gone"] == 1


async def test_client_leaves_while_an_identity_is_learned(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour, d.behaviour = reset, complete_when_told
    p.warm_up_gate.clear()
    assert (await router.post(BODY))[0] == 502
    num_decodes = len(d.requests)
    _, writer = await router.open_raw(STREAM)
    await router.until(lambda s: s["requests"]["in_flight"] == 1)
    await _close(writer)
    now = await router.idle()
    assert now["requests"]["client_gone"] == 1
    assert len(d.requests) == num_decodes
    p.warm_up_gate.set()


async def test_client_leaves_in_the_middle_of_its_body(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    await _close(writer)
    now = await router.idle()
    assert now["requests"]["received"] == 0
    assert not p.requests
    assert not d.requests


async def test_many_clients_leave_and_nothing_is_left(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour, d.behaviour = prefill_when_told, complete_when_told
    writers = [(await router.open_raw(STREAM))[1] for _ in range(30)]
    await d.request(29)
    for writer in writers:
        await _close(writer)
    now = await router.idle()
    assert now["requests"]["client_gone"] == 30


# -- OpenAI's client -----------------------------------------------------------------------------------------------


def _chunk(text: str | None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def test_openai_client_streams(router: Router, d: ScriptedEngine) -> None:
    d.behaviour = stream(_chunk("Hel"), _chunk("lo 🐎"), _chunk(None, "stop"), b"data: [DONE]\n\n")
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="k", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        answer_stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer_stream])
    assert text == "Hello 🐎"


async def test_openai_client_sees_errors(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=[])
        p.behaviour, d.behaviour = reset, complete_when_told
        with pytest.raises(openai.InternalServerError, match="Prefill instance"):
            await client.completions.create(model=MODEL, prompt="x")
        await router.ready()
        p.behaviour = prefill_when_told
        p.gate.set()
        d.behaviour = stream(_chunk("Hel"), then="cut")
        broken = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="incomplete"):
            async for _ in broken:
                pass
