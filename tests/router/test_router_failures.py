"""Engines that fail, in each phase: the client's status, the other leg's end, and the counters."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from kvbaton.types import Direction
from tests.router.conftest import StartRouter
from tests.router.scripted import (
    MODEL,
    Behaviour,
    Router,
    ScriptedEngine,
    Seen,
    answer,
    complete,
    complete_when_told,
    error_of,
    prefill,
    prefill_when_told,
    prefilled,
    reset,
    stream,
)

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
STREAM = {**BODY, "stream": True}
SAID = b'{"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}}'


async def closed(engine: ScriptedEngine, number: int = 0) -> None:
    """The router has closed that request's connection."""
    seen = await engine.request(number)
    async with asyncio.timeout(10):
        await seen.closed.wait()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("status", [400, 429, 500])
async def test_prefill_error_is_passed_on_and_ends_decode(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, direction: Direction, status: int
) -> None:
    router = await start_router(direction=direction)
    d.behaviour = complete_when_told  # never told
    p.behaviour = _after(d, answer(status, SAID)) if direction is Direction.PUSH else answer(status, SAID)
    got, body, headers = await router.post(STREAM)
    assert (got, body) == (status, SAID)
    assert headers["content-type"].startswith("application/json")
    assert headers["x-engine"] == "yes"
    if direction is Direction.PUSH:
        await closed(d)
    else:
        assert not d.requests
    now = await router.idle()
    assert now["requests"]["engine_error"] == 1


@pytest.mark.parametrize("direction", Direction)
async def test_prefill_reset(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, direction: Direction
) -> None:
    router = await start_router(direction=direction)
    d.behaviour = complete_when_told
    p.behaviour = _after(d, reset) if direction is Direction.PUSH else reset
    status, body, _ = await router.post(STREAM)
    error = error_of(body)
    assert status == 502
    assert error["code"] == "prefill_connection_lost"
    assert p.url in error["message"]
    assert "retry" in error["message"]
    if direction is Direction.PUSH:
        await closed(d)
    # Its identity was forgotten and is learned again by a second warm-up.
    await router.until(lambda s: s["prefill"][0]["readiness"] == "ready")
    assert len(p.warm_ups) == 2
    assert (await router.idle())["requests"]["engine_lost"] == 1


@pytest.mark.parametrize("direction", Direction)
async def test_prefill_deadline(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, direction: Direction
) -> None:
    router = await start_router(direction=direction, prefill_timeout_s=0.2)
    p.behaviour, d.behaviour = prefill_when_told, complete_when_told
    status, body, _ = await router.post(BODY)
    assert status == 504
    assert error_of(body)["code"] == "prefill_timeout"
    await closed(p)
    if direction is Direction.PUSH:
        await closed(d)
    await router.idle()


async def test_prefill_down_is_marked_and_comes_back_with_another_identity(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine
) -> None:
    router = await start_router(probe_interval_s=30.0)  # so that the request meets the dead P before a probe does
    await p.stop()
    status, body, headers = await router.post(BODY)
    assert status == 503
    assert error_of(body)["code"] == "prefill_unreachable"
    assert headers["retry-after"] == "1"
    status, body, _ = await router.post(BODY)  # marked: not even tried
    assert status == 503
    assert error_of(body)["code"] == "not_ready"
    async with router.http.get(router.url + "/health") as response:
        assert response.status == 503
        assert p.url in (await response.json())["reason"]
    assert p.identity is not None
    p.identity["remote_engine_id"] = "engine-p-again"
    await p.start()
    now = await router.ready()
    assert now["prefill"][0]["identity"]["remote_engine_id"] == "engine-p-again"
    assert (await router.post(BODY))[0] == 200
    assert (d.requests[-1].params or {})["remote_engine_id"] == "engine-p-again"
    now = await router.idle()
    assert (now["requests"]["engine_lost"], now["requests"]["not_ready"], now["requests"]["delivered"]) == (1, 1, 1)


async def test_a_down_instance_is_not_chosen(start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine) -> None:
    gone = ScriptedEngine("gone", complete)
    await gone.start()
    router = await start_router(decode_urls=(gone.url, d.url), probe_interval_s=30.0)
    await router.until(lambda s: all(one["readiness"] == "ready" for one in s["decode"]))
    await gone.stop()
    statuses = [(await router.post(BODY))[0] for _ in range(5)]
    assert statuses.count(503) <= 1
    assert statuses[-1] == 200


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("status", "body"), [(500, SAID), (400, SAID), (503, b"busy")])
async def test_decode_error_is_passed_on_and_ends_prefill(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, direction: Direction, status: int, body: bytes
) -> None:
    router = await start_router(direction=direction)
    if direction is Direction.PUSH:
        p.behaviour = prefill_when_told
        d.behaviour = _after(p, answer(status, body, "text/plain"))
    else:
        d.behaviour = answer(status, body, "text/plain")
    got, received, headers = await router.post(STREAM)
    assert (got, received) == (status, body)
    assert headers["content-type"].startswith("text/plain")
    if direction is Direction.PUSH:
        await closed(p)
    await router.idle()


@pytest.mark.parametrize("behaviour", [reset, stream(then="cut"), stream(), answer(200, b"")])
async def test_decode_lost_before_its_first_byte(
    router: Router, p: ScriptedEngine, d: ScriptedEngine, behaviour: Behaviour
) -> None:
    p.behaviour = prefill_when_told
    d.behaviour = _after(p, behaviour)
    status, body, _ = await router.post(STREAM)
    assert status == 502
    assert error_of(body)["code"] in ("decode_connection_lost", "decode_bad_answer")
    assert d.url in error_of(body)["message"]
    await closed(p)
    assert (await router.idle())["requests"]["engine_lost"] == 1


async def test_decode_answers_late(start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine) -> None:
    router = await start_router(decode_timeout_s=0.2)
    d.behaviour = complete_when_told
    status, body, _ = await router.post(BODY)
    assert status == 504
    assert error_of(body)["code"] == "decode_timeout"
    await closed(d)
    await router.idle()


async def test_plain_answer_cut_in_the_middle_is_a_clean_error(router: Router, d: ScriptedEngine) -> None:
    async def cut(_: ScriptedEngine, __: Seen, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
        await response.prepare(request)
        await response.write(b'{"half":')
        assert request.transport is not None
        request.transport.close()
        return response

    d.behaviour = cut
    status, body, _ = await router.post(BODY)
    assert status == 502
    assert error_of(body)["code"] == "decode_connection_lost"


async def test_broken_stream_ends_with_an_error_event(router: Router, d: ScriptedEngine) -> None:
    d.behaviour = stream(b'data: {"n": 1}\n\n', b'data: {"n": ', then="cut")
    status, body, headers = await router.post(STREAM)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    begun, event = body.split(b'\n\ndata: {"error"')
    assert begun == b'data: {"n": 1}\n\ndata: {"n": '
    error = error_of(b'{"error"' + event)
    assert error["code"] == "decode_connection_lost"
    assert event.endswith(b"\n\n")
    assert (await router.idle())["requests"]["broken_stream"] == 1


async def test_silent_stream_is_broken_off(start_router: StartRouter, d: ScriptedEngine) -> None:
    router = await start_router(idle_timeout_s=0.2)
    d.behaviour = stream(b"data: 1\n\n", then="hold")
    status, body, _ = await router.post(STREAM)
    assert status == 200
    assert error_of(body.split(b"data: ")[-1])["code"] == "decode_timeout"
    await closed(d)


async def test_head_waits_for_the_commit_point(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    """D's 200 head is here, P fails: the client still gets P's status."""
    d.behaviour = stream(then="hold")

    async def fail_once_decode_has_its_head(_: ScriptedEngine, __: Seen, ___: web.Request) -> web.StreamResponse:
        await d.request()
        return web.Response(status=422, body=SAID)

    p.behaviour = fail_once_decode_has_its_head
    status, body, _ = await router.post(STREAM)
    assert (status, body) == (422, SAID)
    await closed(d)


async def test_decode_may_begin_before_prefill_answers(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour = prefill_when_told
    d.behaviour = stream(b"data: 1\n\n", then="hold")
    async with router.http.post(router.url + "/v1/completions", json=STREAM) as response:
        assert response.status == 200
        assert await response.content.readany() == b"data: 1\n\n"
        p.behaviour = prefill
        p.gate.set()
        await router.until(lambda s: s["prefill"][0]["in_flight"] == 0)
        d.gate.set()
        assert await response.read() == b"data: [DONE]\n\n"
    assert (await router.idle())["transfers"]["push"] == 1


async def test_prefill_lost_after_decode_began_harms_nobody(
    router: Router, p: ScriptedEngine, d: ScriptedEngine
) -> None:
    async def late_reset(engine: ScriptedEngine, seen: Seen, request: web.Request) -> web.StreamResponse:
        await engine.gate.wait()
        return await reset(engine, seen, request)

    p.behaviour = late_reset
    d.behaviour = stream(b"data: 1\n\n", then="hold")
    async with router.http.post(router.url + "/v1/completions", json=STREAM) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        p.gate.set()
        await router.until(lambda s: s["prefill"][0]["failed"] == 1)
        d.gate.set()
        assert await response.read() == b"data: [DONE]\n\n"
    now = await router.idle()
    assert now["requests"]["delivered"] == 1
    assert now["transfers"] == {"push": 0, "pull": 0, "unconfirmed": 1}


async def test_prefill_nobody_waits_for_is_cancelled(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour = prefill_when_told
    d.behaviour = _after(p, complete)
    assert (await router.post(STREAM))[0] == 200
    await closed(p)
    assert (await router.idle())["transfers"]["unconfirmed"] == 1


@pytest.mark.parametrize("direction", Direction)
async def test_prefill_without_params_is_an_error_not_a_silent_recompute(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, direction: Direction
) -> None:
    router = await start_router(direction=direction)
    d.behaviour = complete_when_told
    p.identity = None
    status, body, _ = await router.post(BODY)
    assert status == 502
    error = error_of(body)
    assert error["code"] == "prefill_bad_answer"
    assert "--kv-transfer-config" in error["message"]
    await router.idle()
    now = await router.until(lambda s: s["prefill"][0]["readiness"] == "down")
    assert "--kv-transfer-config" in now["prefill"][0]["reason"]


# -- identity ------------------------------------------------------------------------------------------------------


async def test_identity_changed_dispatches_both_legs_again(
    router: Router, p: ScriptedEngine, d: ScriptedEngine
) -> None:
    assert p.identity is not None
    p.identity["remote_engine_id"] = "engine-new"
    d.behaviour = _first_hangs(complete)
    p.behaviour = _after_each(d, prefill)
    status, body, _ = await router.post(STREAM)
    assert (status, body.count(b"data:")) == (200, 3)
    await closed(d, 0)
    told = [(seen.params or {}) for seen in d.requests]
    assert [params["remote_engine_id"] for params in told] == ["engine-p", "engine-new"]
    transfer_ids = [params["transfer_id"] for params in told]
    assert len(set(transfer_ids)) == 2
    assert [(seen.params or {})["transfer_id"] for seen in p.requests] == transfer_ids
    assert len({seen.headers["X-Request-Id"] for seen in (*p.requests, *d.requests)}) == 1
    now = await router.idle()
    assert now["requests"]["redispatched"] == 1
    assert now["transfers"]["push"] + now["transfers"]["unconfirmed"] == 1
    await router.post(BODY)  # learned: no second dispatch
    assert len(d.requests) == 3


async def test_identity_that_never_settles_is_an_error(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    async def flapping(engine: ScriptedEngine, seen: Seen, _: web.Request) -> web.StreamResponse:
        assert engine.identity is not None
        engine.identity["remote_engine_id"] += "'"
        return prefilled(engine, seen)

    d.behaviour = complete_when_told
    p.behaviour = _after_each(d, flapping)
    status, body, _ = await router.post(BODY)
    assert status == 503
    assert error_of(body)["code"] == "prefill_identity_unstable"
    assert len(p.requests) == 2
    await closed(d, 0)
    await closed(d, 1)
    await router.idle()


async def test_push_waits_for_an_unknown_identity(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour, d.behaviour = reset, complete_when_told
    p.warm_up_gate.clear()
    assert (await router.post(BODY))[0] == 502  # forgets the identity
    p.behaviour, d.behaviour = prefill, complete
    post = asyncio.create_task(router.post(BODY))
    await router.until(lambda s: s["requests"]["in_flight"] == 1)
    assert len(p.requests) == 1
    p.warm_up_gate.set()
    assert (await post)[0] == 200
    assert (d.requests[-1].params or {})["remote_engine_id"] == "engine-p"


async def test_push_to_a_prefill_that_stays_unknown(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine
) -> None:
    router = await start_router(prefill_timeout_s=0.3)
    p.behaviour, d.behaviour = reset, complete_when_told
    p.warm_up_gate.clear()
    assert (await router.post(BODY))[0] == 502
    status, body, _ = await router.post(BODY)
    assert status in (503, 504)
    error_of(body)
    assert len(d.requests) <= 1
    p.warm_up_gate.set()
    await router.idle()


# -- building blocks -----------------------------------------------------------------------------------------------


def _after(other: ScriptedEngine, behaviour: Behaviour) -> Behaviour:
    """Acts once the other engine has the request too."""

    async def behave(engine: ScriptedEngine, seen: Seen, request: web.Request) -> web.StreamResponse:
        await other.request()
        return await behaviour(engine, seen, request)

    return behave


def _after_each(other: ScriptedEngine, behaviour: Behaviour) -> Behaviour:
    """The n-th request is acted on once the other engine has its n-th."""

    async def behave(engine: ScriptedEngine, seen: Seen, request: web.Request) -> web.StreamResponse:
        await other.request(engine.requests.index(seen))
        return await behaviour(engine, seen, request)

    return behave


def _first_hangs(behaviour: Behaviour) -> Behaviour:
    async def behave(engine: ScriptedEngine, seen: Seen, request: web.Request) -> web.StreamResponse:
        if len(engine.requests) == 1:
            await engine.gate.wait()
        return await behaviour(engine, seen, request)

    return behave
