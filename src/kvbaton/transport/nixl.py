"""The transport over NIXL (UCX by default). The only file that imports NIXL.

Invariant: NIXL's progress thread stays off. Its Python agent hard-codes a zero delay, so that thread would spin a core;
instead the owning thread lets the library work in `poll` and `arrivals`, and only while something is in flight.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvbaton.errors import PeerLost, PostFailed, RegistrationFailed, TransportError, Unsupported
from kvbaton.geometry.descriptors import Descriptors
from kvbaton.geometry.mapping import Int64Array
from kvbaton.transport.base import AgentName, Arrival, Handle, Operation, Progress, Span, Transport

if TYPE_CHECKING:
    from nixl_cu12._api import nixl_agent, nixl_xfer_handle

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_PROGRESS = {"DONE": Progress.MOVED, "PROC": Progress.MOVING}
_OPERATIONS = {Operation.WRITE: "WRITE", Operation.READ: "READ"}

_SETTLE_S = 0.1
"""After an error UCX aborts the process when it is closed before it has cleaned up, which takes it a few calls."""


def load_nixl() -> tuple[ModuleType, tuple[type[Exception], ...]]:
    """NIXL's Python interface and every exception it raises. Raises Unsupported with what to install."""
    # On import NIXL attaches a handler that prints at INFO; a serving engine's output is not its place.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    reasons = []
    for package in _PACKAGES:
        try:
            interface = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return interface, native_errors(bindings)
    raise Unsupported(
        f"NIXL cannot be imported ({'; '.join(reasons)}). Install nixl-cu12 (nixl-cu13 for CUDA 13) into the engine's "
        "environment."
    )


def native_errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """NIXL has one exception class per status code and no common base."""
    found = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(error for error in found if isinstance(error, type) and issubclass(error, Exception))


class NixlTransport(Transport):
    def __init__(self, agent_name: str, backends: Sequence[str] = ("UCX",)) -> None:
        """Raises Unsupported when NIXL or one of the backends cannot be used here."""
        interface, self._errors = load_nixl()
        try:
            self._agent: nixl_agent = interface.nixl_agent(
                agent_name, interface.nixl_agent_config(enable_prog_thread=False, backends=list(backends))
            )
        except self._errors as error:
            raise Unsupported(f"NIXL could not start backend {', '.join(backends)}: {error}") from error
        missing = [name for name in backends if name not in self._agent.backends]
        if missing:
            known = ", ".join(self._agent.plugin_list)
            raise Unsupported(f"NIXL has no backend {', '.join(missing)} here. It lists: {known}.")
        self._memory_kind = "DRAM"
        self._device_id = 0
        self._registration: object | None = None
        self._handles: dict[Handle, nixl_xfer_handle] = {}
        self._next_handle = 0
        self._half_posted: set[Handle] = set()
        self._peers: set[AgentName] = set()
        # Who each operation is with; and the peers that are only to be forgotten once nothing moves to or from them.
        self._peer_of: dict[Handle, AgentName] = {}
        self._leaving: set[AgentName] = set()
        self._has_failed = False
        self._is_closed = False

    def register(self, spans: Sequence[Span], memory_kind: str) -> None:
        if memory_kind not in self._agent.nixl_mems:
            raise RegistrationFailed(f"NIXL moves {', '.join(self._agent.nixl_mems)}, not {memory_kind}")
        self._memory_kind = memory_kind
        self._device_id = spans[0].device_id
        try:
            self._registration = self._agent.register_memory(
                [(span.address, span.num_bytes, span.device_id, "") for span in spans], memory_kind
            )
        except self._errors as error:
            total = sum(span.num_bytes for span in spans)
            raise RegistrationFailed(
                f"NIXL could not register {len(spans)} spans, {total} bytes of {memory_kind}: {error}. "
                "Check the locked-memory limit (ulimit -l)."
            ) from error

    def local_metadata(self) -> bytes:
        try:
            return bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise RegistrationFailed(f"NIXL could not describe itself: {error}") from error

    def connect(self, metadata: bytes) -> AgentName:
        try:
            name = self._agent.add_remote_agent(metadata)
            peer = AgentName(name.decode() if isinstance(name, bytes) else str(name))
        except self._errors as error:
            raise PeerLost(f"the peer's NIXL metadata cannot be loaded: {error}") from error
        except UnicodeDecodeError as error:
            raise PeerLost(f"the peer's NIXL agent has a name that is not text: {error}") from error
        self._peers.add(peer)
        self._leaving.discard(peer)
        return peer

    def disconnect(self, peer: AgentName) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._leaving.add(peer)
            self._forget_if_idle(peer)

    def _forget_if_idle(self, peer: AgentName) -> None:
        """NIXL calls everything failed that is in flight with a peer it forgets, and over TCP goes on moving the bytes."""
        if peer not in self._leaving or peer in self._peer_of.values():
            return
        self._leaving.discard(peer)
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as error:
            # Nothing can be posted to it any more either way; the library keeps some memory.
            logging.getLogger(__name__).warning("NIXL could not forget peer %s: %s", peer, error)

    def post(
        self, operation: Operation, peer: AgentName, descriptors: Descriptors, their_device_id: int, notification: bytes
    ) -> Handle:
        self._require_connected(peer)
        ours = self._table(descriptors.our_address, descriptors.length_bytes, self._device_id)
        theirs = self._table(descriptors.their_address, descriptors.length_bytes, their_device_id)
        agent = self._agent
        try:
            native = agent.initialize_xfer(
                _OPERATIONS[operation],
                agent.get_xfer_descs(ours, self._memory_kind),
                agent.get_xfer_descs(theirs, self._memory_kind),
                peer,
                notification,
            )
        except self._errors as error:
            raise PostFailed(f"NIXL could not prepare a {operation.value} to {peer}: {error}") from error
        handle = Handle(self._next_handle)
        self._next_handle += 1
        # Kept from before it is posted: whatever happens next, the handle is released by name.
        self._handles[handle] = native
        self._peer_of[handle] = peer
        try:
            status = agent.transfer(native)
            failure = None if status in _PROGRESS else f"status {status}"
        except self._errors as error:
            failure = str(error)
        if failure is not None:
            self._has_failed = True
            self._half_posted.add(handle)
            if self._let_go(handle):
                raise PostFailed(f"NIXL could not post a {operation.value} to {peer}: {failure}")
            # What was posted of it cannot be stopped yet: it is an operation that has failed, to be released later.
        return handle

    def _require_connected(self, peer: AgentName) -> None:
        if peer in self._leaving:
            raise PostFailed(f"{peer} is disconnected")

    def _table(self, address: Int64Array, length_bytes: Int64Array, device_id: int) -> npt.NDArray[np.uint64]:
        table = np.empty((address.size, 3), dtype=np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = address, length_bytes, device_id
        return table

    def poll(self, handle: Handle) -> Progress:
        try:
            progress = _PROGRESS.get(self._agent.check_xfer_state(self._handles[handle]), Progress.FAILED)
        except self._errors:
            progress = Progress.FAILED
        if handle in self._half_posted:
            progress = Progress.FAILED
        self._has_failed |= progress is Progress.FAILED
        return progress

    def release(self, handle: Handle) -> bool:
        # NIXL lets go of an operation at any time: it cancels it, and over TCP the bytes move all the same.
        return handle not in self._handles or (self.poll(handle) is not Progress.MOVING and self._let_go(handle))

    def _let_go(self, handle: Handle) -> bool:
        try:
            self._handles[handle].release()
        except self._errors:
            return False
        del self._handles[handle]
        self._half_posted.discard(handle)
        self._forget_if_idle(self._peer_of.pop(handle))
        return True

    def notify(self, peer: AgentName, notification: bytes) -> None:
        self._require_connected(peer)
        try:
            self._agent.send_notif(peer, notification)
        except self._errors as error:
            self._has_failed = True
            raise PostFailed(f"NIXL could not notify {peer}: {error}") from error

    def arrivals(self) -> list[Arrival]:
        try:
            news = self._agent.get_new_notifs()
        except self._errors as error:
            raise TransportError(f"NIXL could not look for notifications: {error}") from error
        return [Arrival(AgentName(sender), data) for sender, many in news.items() for data in many]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._settle()
        for handle in list(self._handles):
            self._let_go(handle)
        for peer in self._peers | self._leaving:
            self._leaving.add(peer)
            self._forget_if_idle(peer)
        if self._registration is not None:
            try:
                self._agent.deregister_memory(self._registration)
            except self._errors as error:
                logging.getLogger(__name__).warning("NIXL could not deregister memory: %s", error)
            self._registration = None
        # The library's worker and its connections end with the last reference; only then can nothing land any more.
        self._handles.clear()
        del self._agent

    def _settle(self) -> None:
        end_s = time.monotonic() + _SETTLE_S
        while self._has_failed and time.monotonic() < end_s:
            try:
                self._agent.get_new_notifs()
            except self._errors:
                return
            time.sleep(0.001)
