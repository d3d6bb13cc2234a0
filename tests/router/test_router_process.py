"""The router as a process: its port, its signals, its drain, its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import aiohttp
import pytest

from kvbaton.errors import UsageError
from kvbaton.router.serve import RouterConfig, serve
from tests.router.scripted import MODEL, PATIENCE_S, ScriptedEngine, prefill_when_told, stream

STREAM = {"model": MODEL, "prompt": "hello", "stream": True}


@contextlib.asynccontextmanager
async def router_process(p: ScriptedEngine, d: ScriptedEngine, drain_s: float) -> AsyncIterator[tuple[Process, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = (
        f"prefill_urls=({p.url!r},), decode_urls=({d.url!r},), port={port}, drain_s={drain_s}, probe_interval_s=0.05"
    )
    code = f"from kvbaton.router.serve import RouterConfig, serve; serve(RouterConfig({config}))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=PIPE, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with http.get(url + "/health") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_open_streams_finish_and_the_exit_is_clean(
    p: ScriptedEngine, d: ScriptedEngine, number: signal.Signals
) -> None:
    d.behaviour = stream(b"data: 1\n\n", then="hold")
    async with router_process(p, d, 20.0) as (process, url), aiohttp.ClientSession() as http:
        async with http.post(url + "/v1/completions", json=STREAM) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            process.send_signal(number)
            await _refuses(url)
            d.gate.set()
            assert await response.read() == b"data: [DONE]\n\n"
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


async def test_drain_is_bounded(p: ScriptedEngine, d: ScriptedEngine) -> None:
    p.behaviour = prefill_when_told
    d.behaviour = stream(b"data: 1\n\n", then="hold")
    async with router_process(p, d, 0.5) as (process, url), aiohttp.ClientSession() as http:
        async with http.post(url + "/v1/completions", json=STREAM) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            process.terminate()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
            await p.requests[0].closed.wait()
            await d.requests[0].closed.wait()


async def _refuses(url: str) -> None:
    """No new connection is taken."""
    port = int(url.rpartition(":")[2])
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await asyncio.sleep(0.02)


def test_a_taken_port_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
            serve(RouterConfig(decode_urls=("http://127.0.0.1:9",), port=port))
