from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvbaton.router.serve import RouterConfig
from tests.router.scripted import Router, ScriptedEngine, complete, prefill, run_router

StartRouter = Callable[..., Awaitable[Router]]


@pytest.fixture
async def p() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine("p", prefill)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def d() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine("d", complete)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def start_router(p: ScriptedEngine, d: ScriptedEngine) -> AsyncIterator[StartRouter]:
    """Starts a router in front of `p` and `d` unless told otherwise, and waits until it is ready."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, wait: bool = True, **settings: Any) -> Router:
            settings = {"prefill_urls": (p.url,), "decode_urls": (d.url,), "log_level": "error", **settings}
            settings.setdefault("probe_interval_s", 0.05)
            router = await stack.enter_async_context(run_router(RouterConfig(**settings)))
            if wait:
                await router.ready()
            return router

        yield start


@pytest.fixture
async def router(start_router: StartRouter) -> Router:
    return await start_router()
