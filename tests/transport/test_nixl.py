"""What is NIXL's alone: its errors, its start, and what we say where it is missing."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest

from kvbaton.errors import PostFailed, RegistrationFailed, TransportError, Unsupported
from kvbaton.geometry.descriptors import Descriptors
from kvbaton.transport import nixl
from kvbaton.transport.base import AgentName, Operation, Progress, Span
from kvbaton.transport.nixl import NixlTransport, load_nixl, native_errors

pytestmark = pytest.mark.nixl


def bindings() -> ModuleType:
    interface, _ = load_nixl()
    return importlib.import_module(interface.__name__.removesuffix("_api") + "_bindings")


def test_every_exception_of_the_library_is_caught() -> None:
    """NIXL has a class per status code; one that a new release adds, under another naming, fails here."""
    module = bindings()
    raised = {each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Exception)}
    assert len(raised) > 10
    assert raised == set(native_errors(module))


NOWHERE = Descriptors(*[np.array([8], dtype=np.int64)] * 3)


@pytest.mark.parametrize("error", native_errors(bindings()), ids=lambda error: error.__name__)
def test_every_exception_becomes_one_of_ours_wherever_it_comes_from(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = NixlTransport("engine a/0/1")
    real = transport._agent
    mems = real.nixl_mems

    class Failing:
        nixl_mems = mems

        def __getattr__(self, name: str) -> object:
            def fail(*_args: object, **_kwargs: object) -> NoReturn:
                raise error(name)

            return fail

    monkeypatch.setattr(transport, "_agent", Failing())
    peer = AgentName("peer")
    with pytest.raises(RegistrationFailed):
        transport.register([Span(8, 8, 0)], "DRAM")
    for call in (
        transport.local_metadata,
        lambda: transport.connect(b"x"),
        lambda: transport.post(Operation.WRITE, peer, NOWHERE, 0, b""),
        lambda: transport.notify(peer, b"x"),
        transport.arrivals,
    ):
        with pytest.raises(TransportError, match=r"NIXL|peer's"):
            call()
    transport._peers.add(peer)
    transport.disconnect(peer)
    transport._registration = object()
    transport.close()
    monkeypatch.undo()  # or it would put the real agent back where `close` has removed the failing one
    transport.close()


def test_a_post_that_fails_half_way_leaves_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NixlTransport("engine a/0/1")
    memory = np.zeros(64, dtype=np.uint8)
    address = int(memory.ctypes.data)
    transport.register([Span(address, 64, 0)], "DRAM")
    other = NixlTransport("engine b/0/1")
    other.register([Span(address, 64, 0)], "DRAM")
    peer = transport.connect(other.local_metadata())
    inside = Descriptors(
        np.array([address], dtype=np.int64), np.array([address + 32], dtype=np.int64), np.array([8], dtype=np.int64)
    )
    monkeypatch.setattr(transport._agent, "transfer", lambda _handle: "ERR")
    with pytest.raises(PostFailed, match="status ERR"):
        transport.post(Operation.WRITE, peer, inside, 0, b"")
    assert not transport._handles
    monkeypatch.undo()
    handle = transport.post(Operation.WRITE, peer, inside, 0, b"")
    monkeypatch.setattr(transport._agent, "check_xfer_state", lambda _handle: "ERR")
    assert transport.poll(handle) is Progress.FAILED
    monkeypatch.undo()
    for each in (transport, other):
        each.close()


def test_a_failed_post_that_cannot_be_released_yet_stays_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL refuses to release what it cannot cancel. Nobody may believe then that nothing moves."""
    transport = NixlTransport("engine a/0/1")
    memory = np.zeros(64, dtype=np.uint8)
    address = int(memory.ctypes.data)
    transport.register([Span(address, 64, 0)], "DRAM")
    other = NixlTransport("engine b/0/1")
    other.register([Span(address, 64, 0)], "DRAM")
    peer = transport.connect(other.local_metadata())
    error = native_errors(bindings())[0]

    class Busy:
        is_busy = True

        def release(self) -> None:
            if self.is_busy:
                raise error("still active")

    busy = Busy()
    monkeypatch.setattr(transport._agent, "initialize_xfer", lambda *_args: busy)
    monkeypatch.setattr(transport._agent, "transfer", lambda _handle: "ERR")
    monkeypatch.setattr(transport._agent, "check_xfer_state", lambda _handle: "DONE")
    here = np.array([address], dtype=np.int64)
    inside = Descriptors(here, here, np.array([8], dtype=np.int64))
    handle = transport.post(Operation.WRITE, peer, inside, 0, b"")
    assert transport.poll(handle) is Progress.FAILED
    assert not transport.release(handle)
    transport.disconnect(peer)
    assert transport._leaving
    busy.is_busy = False
    assert transport.release(handle)
    assert not transport._leaving
    monkeypatch.undo()
    for each in (transport, other):
        each.close()


def test_a_backend_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(Unsupported, match="NOSUCH"):
        NixlTransport("engine a/0/1", ["NOSUCH"])


def test_where_nixl_is_missing_we_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in nixl._PACKAGES:
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(Unsupported, match="Install nixl-cu12"):
        load_nixl()
