"""Two drivers with their own threads, on sockets, over the real NIXL; and the same over sockets and the loopback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from kvbaton.runtime.sidechannel import SideChannel
from kvbaton.transport.loopback import LoopbackTransport
from kvbaton.types import Direction, RequestId, TransferId
from tests.runtime.memory_channel import HOST
from tests.runtime.world import Engine, World

P_BLOCKS = [3, 4, 5, 9, 2]
D_BLOCKS = [11, 12, 13, 6, 7]
NUM_TOKENS = 18
PATIENCE_S = 20.0


def on_sockets(**changed: object) -> World:
    return World(make_channel=lambda _network, port: SideChannel(HOST, port), **changed)  # type: ignore[arg-type]


def until(world: World, is_done: Callable[[], bool]) -> None:
    """Turns by hand, on real sockets."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end_s
        for engine in world.engines:
            if engine.is_alive:
                engine.channel.wait(0.001)
                engine.turn()


@pytest.mark.parametrize("direction", Direction)
def test_on_sockets(direction: Direction) -> None:
    world = on_sockets()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    until(world, lambda: bool(d.received and p.sent))
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()
    for engine in world.engines:
        engine.crash()


@pytest.mark.parametrize("direction", Direction)
def test_on_sockets_a_dead_prefill_process_is_noticed_at_once(direction: Direction) -> None:
    world = on_sockets()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    until(world, lambda: p.num_transfers == 1)
    p.crash()
    until(world, lambda: bool(d.received))
    assert "the connection broke" in d.failures[RequestId("d")]
    d.check()
    d.crash()


def test_on_sockets_a_source_that_slept_does_not_write_to_who_hung_up() -> None:
    world = on_sockets()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    p.turn()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.turn()
    p.channel._poller.poll(5000)  # it has come in
    world.now_s += 6.0
    d.turn()
    assert "nobody answers" in d.failures[RequestId("d")]
    d.may_change.clear()
    time.sleep(0.05)  # the hang-up, too
    world.now_s += 31.0
    until(world, lambda: bool(p.sent))
    world.check()
    for engine in world.engines:
        engine.crash()


def started(world: World) -> tuple[Engine, Engine]:
    p, d = world.pair()
    for engine in (p, d):
        object.__setattr__(engine.rank, "clock", time.monotonic)
        engine.driver.start()
    return p, d


def collect(world: World, is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end_s
        for engine in world.engines:
            engine.results.wait(0.01)
            engine.collect()


@pytest.mark.nixl
@pytest.mark.parametrize("direction", Direction)
def test_over_nixl(direction: Direction) -> None:
    from kvbaton.transport.nixl import NixlTransport  # noqa: PLC0415

    world = on_sockets(make_transport=lambda name, _fabric: NixlTransport(name))
    p, d = started(world)
    for index in range(3):
        tid = TransferId(f"t{index}")
        d.open_destination(p.ticket(direction, tid), NUM_TOKENS, D_BLOCKS, rid=f"d{index}")
        p.open_source(tid, f"p{index}")
        p.advance(9, P_BLOCKS[:3], last=False, tid=tid, rid=f"p{index}")
        p.advance(NUM_TOKENS, P_BLOCKS, tid=tid, rid=f"p{index}")
        p.finish(tid, f"p{index}")
        collect(world, lambda index=index: len(d.received) == len(p.sent) == index + 1)  # type: ignore[misc]
        assert d.holds(D_BLOCKS, p, P_BLOCKS)
        assert not d.failures
        d.pool[:, D_BLOCKS] = 0
    for engine in (p, d):
        engine.driver.stop()
        engine.driver.stop()
        engine.check()


class Broken(LoopbackTransport):
    def arrivals(self) -> list[object]:  # type: ignore[override]
        raise ZeroDivisionError("a bug of ours")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_fails_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    # Only D's: if P died too, D might hear of that first and have nothing to do any more.
    world = on_sockets(
        make_transport=lambda name, fabric: (Broken if name.startswith("D/") else LoopbackTransport)(name, fabric)
    )
    p, d = started(world)
    with caplog.at_level(logging.CRITICAL):
        d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
        with pytest.raises(ZeroDivisionError, match="a bug of ours"):
            collect(world, lambda: False)
    with pytest.raises(ZeroDivisionError):
        d.results.take()  # it stays that way
    d.driver.submit([])  # its wake-up is closed
    for engine in (p, d):
        engine.driver.stop()


def test_stopping_what_never_started_releases_everything() -> None:
    world = on_sockets()
    p, _ = world.pair()
    port = p.channel.port
    p.driver.stop()
    p.driver.stop()
    SideChannel(HOST, port).close()  # the port is free again
    world.engines[1].driver.stop()
    assert not world.fabric.ends


def test_an_idle_driver_waits_and_stops_when_told() -> None:
    world = on_sockets()
    p, d = started(world)
    assert p.driver._pause_s() == 1.0
    for engine in (p, d):
        engine.driver.stop()
    assert not any(thread.name == "kvbaton" for thread in threading.enumerate())
