"""The worker side over the real NIXL: a step's commands go down, what is over comes up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from kvbaton.cluster_key import make_key_file
from kvbaton.connector.handover import StepHandover
from kvbaton.connector.settings import ConnectorSettings
from kvbaton.connector.worker import WorkerSide
from kvbaton.errors import UsageError
from kvbaton.geometry.layout import Region, plain
from kvbaton.protocol.params import DecodeTicket
from kvbaton.runtime.events import (
    Batch,
    DestinationCancelled,
    DestinationOpened,
    SourceAdvanced,
    SourceFinished,
    SourceOpened,
)
from kvbaton.transport.base import Span
from kvbaton.types import Direction, EngineId, RequestId, TransferId
from tests.unit.geometry.layouts import layout

pytestmark = pytest.mark.nixl

T, P, D = TransferId("t"), RequestId("p"), RequestId("d")
PATIENCE_S = 20.0


class Side:
    def __init__(self, name: str, **changed: object) -> None:
        self.pool = np.random.default_rng(len(name)).integers(0, 256, (8, 64), dtype=np.uint8)
        settings = msgspec.structs.replace(ConnectorSettings(), **changed)
        self.worker = WorkerSide(settings, EngineId(name), rank=0)

    def register(self) -> Side:
        address = int(self.pool.ctypes.data)
        self.worker.register(
            layout(Region("layer", 0, address, 8, 64, 16, 1, 1, 64, plain(4, 4)), num_kv_heads=1),
            [Span(address, self.pool.nbytes, 0)],
        )
        return self


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    sides = Side("p").register(), Side("decode").register()
    yield sides
    for side in sides:
        side.worker.shutdown()
        side.worker.shutdown()


def collect(side: Side, is_done: Callable[[Batch], bool]) -> Batch:
    whole, end_s = Batch(), time.monotonic() + PATIENCE_S
    while not is_done(whole):
        assert time.monotonic() < end_s
        batch = side.worker.collect(is_idle_step=True)
        whole.sent |= batch.sent
        whole.received |= batch.received
        whole.failed |= batch.failed
    return whole


def want(p: Side) -> DestinationOpened:
    address = p.worker.address
    ticket = DecodeTicket(T, EngineId("p"), address.host, address.port, 1, 1, Direction.PUSH)
    return DestinationOpened(ticket, D, 0, 32, ((3, 4),))


def test_a_push_from_step_to_step(pair: tuple[Side, Side]) -> None:
    p, d = pair
    d.worker.submit_before(StepHandover(before_forward=[want(p)]))
    p.worker.submit_before(StepHandover(before_forward=[SourceOpened(T, P)]))
    whole = StepHandover(
        after_forward=[
            SourceAdvanced(T, P, 0, 32, True, ((1, 2),)),
            SourceFinished(T, P, is_held=True, is_aborted=False),
        ]
    )
    p.worker.submit_after(whole, None)
    assert collect(d, lambda batch: bool(batch.received)) == Batch(received={D})
    assert collect(p, lambda batch: bool(batch.sent)) == Batch(sent={P})
    assert (d.pool[[3, 4]] == p.pool[[1, 2]]).all()


def test_no_call_of_the_engine_waits_for_the_transfer_thread(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has come back, with the thread stuck all the while. A wait for a preempted block is bounded, elsewhere."""
    p, d = pair
    is_stuck, goes_on = threading.Event(), threading.Event()
    assert d.worker._driver is not None
    turn = d.worker._driver.turn

    def stuck() -> None:
        is_stuck.set()
        goes_on.wait()
        turn()

    monkeypatch.setattr(d.worker._driver, "turn", stuck)
    d.worker.submit_before(StepHandover(before_forward=[want(p)]))
    assert is_stuck.wait(PATIENCE_S)
    try:
        for step in range(1000):
            request_id = RequestId(f"p{step}")
            d.worker.submit_before(StepHandover(before_forward=[SourceOpened(TransferId(request_id), request_id)]))
            finished = SourceFinished(TransferId(request_id), request_id, is_held=False, is_aborted=True)
            d.worker.submit_after(StepHandover(after_forward=[finished]), None)
            assert d.worker.collect(is_idle_step=False) == Batch()
            d.worker.take_stats()
        assert not goes_on.is_set()
    finally:
        goes_on.set()
    p.worker.submit_before(StepHandover(before_forward=[SourceOpened(T, P)]))
    p.worker.submit_after(StepHandover(after_forward=[SourceAdvanced(T, P, 0, 32, True, ((1, 2),))]), None)
    assert collect(d, lambda batch: bool(batch.received)) == Batch(received={D})


def test_a_request_that_finishes_while_it_loads_is_cancelled(pair: tuple[Side, Side]) -> None:
    p, d = pair
    d.worker.submit_before(StepHandover(before_forward=[want(p)]))
    d.worker.submit_before(StepHandover(before_forward=[DestinationCancelled(RequestId("somebody else"))]))
    d.worker.submit_before(StepHandover(before_forward=[DestinationCancelled(D)]))
    batch = collect(d, lambda batch: bool(batch.received))
    assert batch == Batch(received={D}, failed={D: "the decode request was given up"})


def test_what_nobody_waits_for_never_reaches_the_engine(pair: tuple[Side, Side]) -> None:
    """vLLM's scheduler asserts that it knows every request that is reported; it forgets one when it is reported."""
    _, d = pair
    d.worker._results.received(RequestId("unknown"), "lost")
    d.worker._results.sent(RequestId("unknown"))
    assert d.worker.collect(is_idle_step=True) == Batch()
    d.worker.submit_before(StepHandover(before_forward=[DestinationCancelled(D)]))  # over before it was called off
    assert d.worker.collect(is_idle_step=True) == Batch()


def test_a_rejected_request_is_a_failed_load_in_the_same_step(pair: tuple[Side, Side]) -> None:
    _, d = pair
    d.worker.submit_before(StepHandover(rejected={D: "remote_port"}))
    assert d.worker.collect(is_idle_step=True) == Batch(received={D}, failed={D: "remote_port"})
    assert d.worker.take_failed_loads() == {D}
    assert not d.worker.take_failed_loads()
    assert d.worker.collect(is_idle_step=True) == Batch()


def test_preempted_blocks_are_released_before_the_step_goes_on(pair: tuple[Side, Side]) -> None:
    p, _ = pair
    p.worker.submit_before(StepHandover(before_forward=[SourceOpened(T, P)]))
    began_s = time.monotonic()
    p.worker.submit_before(StepHandover(preempted=[(T, P), (TransferId("nobody's"), P)]))
    assert time.monotonic() - began_s < 5.0


def test_a_side_that_never_saw_a_cache_lets_go_of_its_port() -> None:
    """Found: an engine that failed to start kept its side channel until the process ended."""
    side = Side("p")
    side.worker.submit_before(StepHandover(preempted=[(T, P)]))
    port = side.worker.address.port
    side.worker.shutdown()
    side.worker.shutdown()
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


def test_a_taken_port_is_found_before_the_model_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="side_channel_port"):
            Side("p", side_channel_port=taken.getsockname()[1])


def test_a_key_open_to_others_ends_the_start_and_leaves_the_port_free(tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    make_key_file(key)
    key.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        Side("p", cluster_key_file=str(key))
    key.chmod(0o600)
    side = Side("p", cluster_key_file=str(key), side_channel_host="0.0.0.0", advertised_host="gpu-7")
    assert side.worker.address.host == "gpu-7"
    side.worker.shutdown()
