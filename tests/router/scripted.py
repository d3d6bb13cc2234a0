"""Scripted engines and a real router, all on real sockets in one event loop.

An engine answers what its test tells it to and records what it was sent. Nothing sleeps: tests wait for events.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvbaton.router.serve import RouterConfig, RouterServer

PATIENCE_S = 10.0
MODEL = "tiny"
SSE_CHUNKS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")


@dataclass
class Seen:
    """One request as an engine got it."""

    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: dict[str, Any]
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the handler has ended because the router closed the connection."""

    @property
    def params(self) -> dict[str, Any] | None:
        params: dict[str, Any] | None = self.body.get("kv_transfer_params")
        return params


Behaviour = Callable[["ScriptedEngine", Seen, web.Request], Awaitable[web.StreamResponse]]


class ScriptedEngine:
    def __init__(self, name: str, behaviour: Behaviour) -> None:
        self.name = name
        self.behaviour = behaviour
        self.models = [MODEL]
        self.health_status = 200
        self.identity: dict[str, Any] | None = {
            "remote_engine_id": f"engine-{name}",
            "remote_host": "10.0.0.7",
            "remote_port": 5601,
            "tp_size": 2,
            "pp_size": 1,
        }
        self.requests: list[Seen] = []
        self.warm_ups: list[Seen] = []
        self.warm_up_gate = asyncio.Event()
        self.warm_up_gate.set()
        self.gate = asyncio.Event()
        """Behaviours that wait, wait for this."""
        self.url = ""
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def request(self, number: int = 0) -> Seen:
        """The request of that number, once it has arrived."""
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) > number)
        return self.requests[number]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _models(self, _: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "owned_by": self.name} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = Seen(request.path, request.headers, raw, json.loads(raw))
        if seen.body.get("prompt") == [0]:
            self.warm_ups.append(seen)
            await self.warm_up_gate.wait()
            return prefilled(self, seen)
        self.requests.append(seen)
        async with self._arrived:
            self._arrived.notify_all()
        try:
            return await self.behaviour(self, seen, request)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.closed.set()
            raise


def prefilled(engine: ScriptedEngine, seen: Seen) -> web.Response:
    """P's answer."""
    params: dict[str, Any] | None = None
    if engine.identity is not None:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **engine.identity,
            "remote_request_id": f"cmpl-{seen.headers['X-Request-Id']}-0-abcd1234",
            "remote_block_ids": [[1, 2, 3]],
            "remote_num_tokens": 33,
            "transfer_mode": "push",
            "transfer_id": (seen.params or {}).get("transfer_id"),
        }
    return web.json_response({"id": "x", "choices": [{"text": "t"}], "kv_transfer_params": params})


# -- behaviours ----------------------------------------------------------------------------------------------------


async def prefill(engine: ScriptedEngine, seen: Seen, _: web.Request) -> web.StreamResponse:
    return prefilled(engine, seen)


async def prefill_when_told(engine: ScriptedEngine, seen: Seen, _: web.Request) -> web.StreamResponse:
    await engine.gate.wait()
    return prefilled(engine, seen)


async def complete(_: ScriptedEngine, seen: Seen, request: web.Request) -> web.StreamResponse:
    """D's answer, streamed if asked."""
    if not seen.body.get("stream"):
        return web.json_response({"id": "c", "object": "text_completion", "choices": [{"text": "hi", "index": 0}]})
    return await send_stream(request, SSE_CHUNKS)


async def complete_when_told(engine: ScriptedEngine, seen: Seen, request: web.Request) -> web.StreamResponse:
    await engine.gate.wait()
    return await complete(engine, seen, request)


async def reset(_: ScriptedEngine, __: Seen, request: web.Request) -> web.StreamResponse:
    """The connection breaks before an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def answer(status: int, body: bytes, content_type: str = "application/json") -> Behaviour:
    async def behave(_: ScriptedEngine, __: Seen, ___: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type, headers={"x-engine": "yes"})

    return behave


def stream(*chunks: bytes, then: str = "end") -> Behaviour:
    """SSE in these pieces; then the end, a cut connection, or nothing until the gate opens ("hold")."""

    async def behave(engine: ScriptedEngine, _: Seen, request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for chunk in chunks:
            await response.write(chunk)
        if then == "cut":
            assert request.transport is not None
            request.transport.close()
        elif then == "hold":
            await engine.gate.wait()
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    return behave


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def send_stream(request: web.Request, chunks: tuple[bytes, ...]) -> web.StreamResponse:
    response = await open_stream(request)
    for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


# -- the router ----------------------------------------------------------------------------------------------------


@dataclass
class Router:
    """A running router and a client of it."""

    url: str
    port: int
    http: aiohttp.ClientSession

    async def status(self) -> dict[str, Any]:
        async with self.http.get(self.url + "/status") as response:
            status: dict[str, Any] = await response.json()
            return status

    async def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first /status of which `is_so` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await self.status()
                if is_so(status):
                    return status
                await asyncio.sleep(0.005)

    async def ready(self) -> dict[str, Any]:
        return await self.until(lambda status: bool(status["ready"]))

    async def idle(self) -> dict[str, Any]:
        """Nothing is in flight any more, on any instance."""
        return await self.until(
            lambda status: (
                status["requests"]["in_flight"] == 0
                and all(one["in_flight"] == 0 for one in (*status["prefill"], *status["decode"]))
            )
        )

    async def post(
        self, body: dict[str, Any] | bytes, *, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        typed = {"content-type": "application/json", **(headers or {})}
        async with asyncio.timeout(PATIENCE_S), self.http.post(self.url + path, data=data, headers=typed) as response:
            return response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()}

    async def open_raw(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a socket of its own, to be closed at will."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + data)
        await writer.drain()
        return reader, writer


class QuickServer(RouterServer):
    """Ends without uvicorn's pauses; the real ending is tested with a process of its own."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.told_to_end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.told_to_end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=PATIENCE_S)
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def run_router(config: RouterConfig) -> AsyncIterator[Router]:
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    server = QuickServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.002)
            if task.done():
                task.result()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield Router(f"http://127.0.0.1:{port}", port, http)
    finally:
        server.told_to_end.set()
        await task
        listener.close()


def error_of(body: bytes) -> dict[str, Any]:
    """The error object; its shape is checked."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return error
