"""Push and pull: what each engine is sent, and when."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvbaton.router.policy import Policy
from kvbaton.types import Direction
from tests.router.conftest import StartRouter
from tests.router.scripted import (
    MODEL,
    Router,
    ScriptedEngine,
    complete,
    complete_when_told,
    prefill,
    prefill_when_told,
    stream,
)

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8}


async def test_push_legs_overlap(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour = prefill_when_told
    post = asyncio.create_task(router.post(BODY))
    await p.request()
    await d.request()  # arrives although P has not answered
    p.gate.set()
    status, body, _ = await post
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "hi"


async def test_push_fields(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    await router.post({**BODY, "stream": True, "temperature": 0.5})
    to_p, to_d = p.requests[0], d.requests[0]
    request_id = to_p.headers["X-Request-Id"]
    assert to_d.headers["X-Request-Id"] == request_id
    assert to_p.params is not None
    transfer_id = to_p.params["transfer_id"]
    assert to_p.params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert to_d.params == {
        "remote_engine_id": "engine-p",
        "remote_host": "10.0.0.7",
        "remote_port": 5601,
        "tp_size": 2,
        "pp_size": 1,
        "remote_request_id": request_id,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
    }
    assert to_p.body["max_tokens"] == 1
    assert to_p.body["stream"] is False
    assert {**BODY, "stream": True, "temperature": 0.5, "kv_transfer_params": to_d.params} == to_d.body


async def test_ids_are_fresh_for_every_request(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    for _ in range(3):
        await router.post(BODY)
    assert len({(seen.params or {})["transfer_id"] for seen in d.requests}) == 3
    assert len({seen.headers["X-Request-Id"] for seen in d.requests}) == 3
    assert [seen.headers["X-Request-Id"] for seen in p.requests] == [s.headers["X-Request-Id"] for s in d.requests]


async def test_pull_is_sequential_and_passes_the_answer_on(
    start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine
) -> None:
    router = await start_router(direction=Direction.PULL)
    p.behaviour = prefill_when_told
    post = asyncio.create_task(router.post(BODY))
    await p.request()
    assert not d.requests
    p.gate.set()
    status, _, _ = await post
    assert status == 200
    to_p, to_d = p.requests[0], d.requests[0]
    request_id = to_p.headers["X-Request-Id"]
    assert to_d.headers["X-Request-Id"] == request_id
    assert to_d.params is not None
    assert to_d.params["remote_block_ids"] == [[1, 2, 3]]
    assert to_d.params["remote_request_id"] == f"cmpl-{request_id}-0-abcd1234"
    assert to_d.params["remote_num_tokens"] == 33
    status_now = await router.idle()
    assert status_now["transfers"] == {"push": 0, "pull": 1, "unconfirmed": 0}


async def test_chat(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "héllo"}],
        "max_completion_tokens": 9,
        "min_tokens": 3,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, _, _ = await router.post(body, path="/v1/chat/completions")
    assert status == 200
    to_p = p.requests[0].body
    assert to_p["max_completion_tokens"] == 1
    assert to_p["max_tokens"] == 1
    assert not {"min_tokens", "stream_options"} & set(to_p)
    assert to_p["tools"] == body["tools"]
    assert to_p["messages"] == body["messages"]
    assert p.requests[0].path == d.requests[0].path == "/v1/chat/completions"
    assert d.requests[0].body["max_completion_tokens"] == 9


async def test_client_cannot_steer(router: Router, p: ScriptedEngine, d: ScriptedEngine) -> None:
    steering = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil", "remote_block_ids": [1]},
        "ec_transfer_params": {"x": 1},
        "request_id": "mine",
        "vllm_xargs": {"kv_transfer_params": "boom", "keep": 1},
    }
    status, _, headers = await router.post(
        {**BODY, **steering}, headers={"X-Request-Id": "mine", "X-data-parallel-rank": "7", "authorization": "Bearer k"}
    )
    assert status == 200
    assert headers["x-request-id"] == "mine"
    for seen in (p.requests[0], d.requests[0]):
        assert seen.headers["X-Request-Id"] != "mine"
        assert "X-data-parallel-rank" not in seen.headers
        assert seen.headers["authorization"] == "Bearer k"
        assert "evil" not in seen.raw.decode()
        assert not {"ec_transfer_params", "request_id"} & set(seen.body)
        assert seen.body["vllm_xargs"] == {"keep": 1}


async def test_our_request_id_is_told_when_the_client_sent_none(router: Router, d: ScriptedEngine) -> None:
    _, _, headers = await router.post(BODY)
    assert headers["x-request-id"] == d.requests[0].headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"n": 2}, "several_choices"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncation"),
    ],
)
async def test_decode_only(
    router: Router, p: ScriptedEngine, d: ScriptedEngine, extra: dict[str, object], reason: str
) -> None:
    status, _, _ = await router.post({**BODY, **extra, "kv_transfer_params": {"do_remote_prefill": True}})
    assert status == 200
    assert not p.requests
    assert d.requests[0].body == {**BODY, **extra}
    now = await router.idle()
    assert now["decode_only"][reason] == 1
    assert now["transfers"]["push"] == 0


async def test_without_prefill_instances(start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine) -> None:
    router = await start_router(prefill_urls=())
    status, _, _ = await router.post(BODY)
    assert status == 200
    assert not p.requests
    assert not p.warm_ups
    now = await router.status()
    assert now["decode_only"]["no_prefill"] == 1


async def test_round_robin_over_several(start_router: StartRouter, p: ScriptedEngine, d: ScriptedEngine) -> None:
    p2, d2 = ScriptedEngine("p2", prefill), ScriptedEngine("d2", complete)
    await p2.start()
    await d2.start()
    try:
        router = await start_router(
            prefill_urls=(p.url, p2.url), decode_urls=(d.url, d2.url), policy=Policy.ROUND_ROBIN
        )
        await router.until(lambda s: all(one["readiness"] == "ready" for one in (*s["prefill"], *s["decode"])))
        for _ in range(4):
            await router.post(BODY)
        assert [len(engine.requests) for engine in (p, p2, d, d2)] == [2, 2, 2, 2]
        # Each D was told of the P that got the same transfer.
        for one in (p, p2):
            for seen in one.requests:
                twin = next(
                    other
                    for other in (*d.requests, *d2.requests)
                    if (other.params or {})["transfer_id"] == (seen.params or {})["transfer_id"]
                )
                assert (twin.params or {})["remote_engine_id"] == f"engine-{one.name}"
    finally:
        await p2.stop()
        await d2.stop()


async def test_load_counts_until_the_stream_ends(start_router: StartRouter, d: ScriptedEngine) -> None:
    d2 = ScriptedEngine("d2", complete)
    await d2.start()
    try:
        router = await start_router(decode_urls=(d.url, d2.url), policy=Policy.LEAST_IN_FLIGHT)
        await router.until(lambda s: all(one["readiness"] == "ready" for one in s["decode"]))
        for engine in (d, d2):
            engine.behaviour = stream(b"data: 1\n\n", then="hold")
        async with router.http.post(router.url + "/v1/completions", json={**BODY, "stream": True}) as response:
            assert await response.content.readany() == b"data: 1\n\n"  # its head and first byte are long out
            busy, idle = (d, d2) if d.requests else (d2, d)
            idle.behaviour = complete
            for _ in range(3):
                await router.post(BODY)
            assert len(busy.requests) == 1
            assert len(idle.requests) == 3
            busy.gate.set()
            await response.read()
        now = await router.idle()
        assert now["requests"]["delivered"] == 4
    finally:
        await d2.stop()


async def test_models_lists_what_engines_serve(router: Router) -> None:
    async with router.http.get(router.url + "/v1/models") as response:
        listed = await response.json()
    assert listed == {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "d"}]}


async def test_no_limit_of_a_hundred_connections(router: Router, d: ScriptedEngine) -> None:
    d.behaviour = complete_when_told
    posts = [asyncio.create_task(router.post(BODY)) for _ in range(120)]
    await d.request(99)
    d.gate.set()
    assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}
