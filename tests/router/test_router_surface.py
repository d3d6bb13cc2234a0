"""Requests that never reach an engine, and the router's own reports, all in OpenAI's shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbaton.errors import UsageError
from kvbaton.router.app import build_app
from kvbaton.router.settings import RouterConfig
from kvbaton.types import Direction
from tests.router.conftest import StartRouter
from tests.router.scripted import MODEL, Router, ScriptedEngine, answer, error_of, prefill_when_told

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8}


BAD = [
    (b"{", "/v1/completions", "invalid_json"),
    (b"[]", "/v1/completions", "invalid_body"),
    (b'{"prompt": "x"}', "/v1/completions", "missing_field"),
    (b'{"model": "tiny", "prompt": 3}', "/v1/completions", "invalid_type"),
    (b'{"model": "tiny", "messages": "hi"}', "/v1/chat/completions", "invalid_type"),
    (b'{"model": "tiny", "prompt": "hi"}', "/v1/chat/completions", "missing_field"),
]


async def test_bad_bodies_touch_no_engine(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    for body, path, code in BAD:  # every kind of mistake is listed in tests/unit/router/test_router_request.py
        status, received, _ = await router.post(body, path=path)
        error = error_of(received)
        assert (status, error["code"], error["type"]) == (400, code, "invalid_request_error")
    assert not p.requests
    assert not d.requests
    assert (await router.status())["requests"]["rejected"] == len(BAD)


async def test_unknown_model(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    status, body, _ = await router.post({**BODY, "model": "gpt-4"})
    error = error_of(body)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert MODEL in error["message"]
    assert not p.requests
    assert not d.requests


async def test_content_types(router: Router) -> None:
    for content_type in ("application/json; charset=utf-8", "Application/JSON"):
        assert (await router.post(BODY, headers={"content-type": content_type}))[0] == 200
    status, body, _ = await router.post(BODY, headers={"content-type": "text/plain"})
    assert (status, error_of(body)["code"]) == (415, "unsupported_media_type")


async def test_body_limit(start_router: StartRouter, d: ScriptedEngine) -> None:
    router = await start_router(max_body_bytes=1000)
    long = {**BODY, "prompt": "x" * 1000}
    status, body, headers = await router.post(long)
    assert (status, error_of(body)["code"]) == (413, "body_too_large")
    assert headers["connection"] == "close"

    async def in_pieces() -> Any:
        yield json.dumps(long).encode()[:600]
        yield json.dumps(long).encode()[600:]

    typed = {"content-type": "application/json"}  # and no content-length
    async with router.http.post(router.url + "/v1/completions", data=in_pieces(), headers=typed) as response:
        assert response.status == 413
    assert not d.requests
    assert (await router.post(BODY))[0] == 200


async def test_no_such_path_or_method(router: Router) -> None:
    async with router.http.get(router.url + "/v2/completions") as response:
        assert response.status == 404
        assert error_of(await response.read())["code"] == "not_found"
    async with router.http.get(router.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"
        assert error_of(await response.read())["code"] == "method_not_allowed"


# -- health and status ---------------------------------------------------------------------------------------------


async def test_not_ready_before_the_engines_are(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine
) -> None:
    d.health_status = 503
    router = await start_router(wait=False)
    await router.until(lambda s: s["decode"][0]["readiness"] == "down" and s["prefill"][0]["readiness"] == "ready")
    async with router.http.get(router.url + "/health") as response:
        assert response.status == 503
        assert "/health answered 503" in (await response.json())["reason"]
    status, body, _ = await router.post(BODY)
    assert (status, error_of(body)["code"]) == (503, "not_ready")
    async with router.http.get(router.url + "/v1/models") as response:
        assert response.status == 503
    d.health_status = 200
    await router.ready()
    async with router.http.get(router.url + "/health") as response:
        assert response.status == 200
    assert (await router.post(BODY))[0] == 200


async def test_an_engine_that_falls_ill_is_taken_out(router: Router, d: ScriptedEngine) -> None:
    d.health_status = 503
    await router.until(lambda s: not s["ready"])
    d.health_status = 200
    await router.ready()


@pytest.mark.parametrize("direction", Direction)
async def test_warm_up(start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, direction: Direction) -> None:
    router = await start_router(direction=direction)
    for _ in range(3):
        await router.post(BODY)
    assert len(p.warm_ups) == 1
    assert not d.warm_ups
    warm_up = p.warm_ups[0]
    assert (warm_up.body["model"], warm_up.body["prompt"], warm_up.body["max_tokens"]) == (MODEL, [0], 1)
    assert (warm_up.params or {})["do_remote_decode"] is True
    assert (warm_up.params or {})["transfer_id"]
    assert (warm_up.params or {})["identity_only"] is True
    now = await router.idle()
    prefill_status = now["prefill"][0]
    assert prefill_status["identity_known"] is True
    assert prefill_status["routed"] == now["decode"][0]["routed"] == now["requests"]["received"] == 3
    # The scripted decode engine may answer before the prefill engine has.
    assert now["transfers"][direction.value] + now["transfers"]["unconfirmed"] == now["requests"]["delivered"] == 3
    assert now["direction"] == direction.value


async def test_a_prefill_engine_without_connector_is_not_ready(start_router: StartRouter, p: ScriptedEngine) -> None:
    p.identity = None
    router = await start_router(wait=False)
    now = await router.until(lambda s: s["prefill"][0]["readiness"] == "down")
    assert "--kv-transfer-config" in now["prefill"][0]["reason"]
    assert now["prefill"][0]["identity_known"] is False


@pytest.mark.parametrize(
    "params", [{"remote_port": 0}, {"remote_host": ""}, {"tp_size": "2"}, {"remote_engine_id": None}]
)
async def test_a_partial_identity_is_not_believed(
    start_router: StartRouter, p: ScriptedEngine, params: dict[str, Any]
) -> None:
    assert p.identity is not None
    p.identity.update(params)
    router = await start_router(wait=False)
    now = await router.until(lambda s: s["prefill"][0]["readiness"] == "down")
    assert "kv_transfer_params cannot be used" in now["prefill"][0]["reason"]


async def test_a_failing_warm_up_is_told(start_router: StartRouter, p: ScriptedEngine) -> None:
    p.models = []
    router = await start_router(wait=False)
    now = await router.until(lambda s: s["prefill"][0]["readiness"] == "down")
    assert "no model" in now["prefill"][0]["reason"]


async def test_model_names_are_refreshed(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.models = d.models = [MODEL, "lora-1"]
    await router.until(lambda s: "lora-1" in s["decode"][0]["models"] and "lora-1" in s["prefill"][0]["models"])
    assert (await router.post({**BODY, "model": "lora-1"}))[0] == 200


# -- timeline ------------------------------------------------------------------------------------------------------


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_timeline(start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, tmp_path: Path) -> None:
    path = tmp_path / "router.jsonl"
    router = await start_router(trace_path=str(path))
    await router.post({**BODY, "stream": True})
    await router.idle()
    events = _events(path)  # flushed although the router still runs
    names = [event["event"] for event in events]
    assert names[0] == "received"
    assert names[-1] == "finished"
    assert sorted(names) == sorted(
        ["received", "prefill_dispatched", "decode_dispatched", "prefill_answered", "first_byte", "finished"]
    )
    by_name = {event["event"]: event for event in events}
    transfer_id = (d.requests[0].params or {})["transfer_id"]
    for event in events:
        assert event["who"] == "router"
        assert event["transfer_id"] == transfer_id
        assert event["request_id"] == d.requests[0].headers["X-Request-Id"]
    times = [event["t_unix_s"] for event in events]
    assert times == sorted(times)
    assert by_name["received"]["direction"] == "push"
    assert by_name["received"]["path"] == "/v1/completions"
    assert by_name["prefill_dispatched"]["url"] == p.url
    assert by_name["decode_dispatched"]["url"] == d.url
    assert by_name["prefill_answered"]["status"] == 200
    assert (by_name["finished"]["status"], by_name["finished"]["outcome"]) == (200, "delivered")


async def test_timeline_of_failures(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "router.jsonl"
    router = await start_router(trace_path=str(path))
    d.behaviour = answer(500, b"{}")
    p.behaviour = prefill_when_told
    await router.post(BODY)
    await router.post({**BODY, "n": 2})
    await router.idle()
    finished = [event for event in _events(path) if event["event"] == "finished"]
    assert [(event["status"], event["outcome"]) for event in finished] == [(500, "engine_error")] * 2
    received = [event["direction"] for event in _events(path) if event["event"] == "received"]
    assert received == ["push", "decode-only"]


def test_trace_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trace file"):
        build_app(RouterConfig(decode_urls=("http://a:1",), trace_path=str(tmp_path / "no" / "where")))
