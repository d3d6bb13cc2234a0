"""What doctor.py asks another process, because native libraries can crash or hang the one that loads them.

    python -m kvbaton.launch.doctor_probe engine|nixl|transfer

Invariant: every fact is a line of stdout that is a JSON object, written as soon as it is known; the caller merges them,
sets a deadline, and keeps what was known before a crash. Imports NIXL and torch by name at run time: which build is
there is the question.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
TRIO = ("torchvision", "torchaudio", "torchcodec")
_SIZE_BYTES = 1 << 20
_ROUNDS = 64
_PATTERN = 0xA5
_PEER_TIMEOUT_S = 12.0


Facts = dict[str, object]


def probe_engine() -> Iterator[Facts]:
    """Torch's version, why packages that must match it do not import, and the platform that vLLM decides for."""
    torch = importlib.import_module("torch")
    yield {"torch": torch.__version__}
    broken: dict[str, str] = {}
    for name in TRIO:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            broken[name] = str(error).strip().splitlines()[0]
    yield {"broken": broken}
    yield {"platform": type(importlib.import_module("vllm.platforms").current_platform).__name__}


def probe_nixl() -> Iterator[Facts]:
    """The plugins of NIXL, after an agent with the UCX backend was made."""
    agent = _new_agent(_load_nixl(), "doctor")
    yield {"plugins": sorted(agent.get_plugin_list()), "backends": sorted(agent.backends)}


def probe_transfer() -> Iterator[Facts]:
    """Another process wrote a pattern into our memory through NIXL; says how fast."""
    memory = np.zeros(_SIZE_BYTES, dtype=np.uint8)
    agent = _new_agent(_load_nixl(), "doctor-destination")
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    command = [sys.executable, "-m", "kvbaton.launch.doctor_probe", "peer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:  # noqa: S603 - ourselves
        if peer.stdin is None or peer.stdout is None:
            raise RuntimeError("no pipes to the second process")
        peer.stdin.write(
            json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": memory.ctypes.data}) + "\n"
        )
        peer.stdin.flush()
        deadline_s = time.monotonic() + _PEER_TIMEOUT_S
        while peer.poll() is None and time.monotonic() < deadline_s:
            # No progress thread: over TCP nothing arrives unless we let the library work.
            agent.get_new_notifs()
            time.sleep(0.0005)
        peer.kill()
        lines = peer.stdout.read().splitlines()
    if peer.returncode != 0 or not lines:
        raise RuntimeError(f"the second process ended with exit code {peer.returncode}")
    if not bool((memory == _PATTERN).all()):
        raise RuntimeError("the bytes that arrived are not those that were sent")
    yield json.loads(lines[-1])


def probe_peer() -> Iterator[Facts]:
    """The other end of `probe_transfer`: writes 1 MiB a number of times."""
    there = json.loads(sys.stdin.readline())
    memory = np.full(_SIZE_BYTES, _PATTERN, dtype=np.uint8)
    agent = _new_agent(_load_nixl(), "doctor-source")
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    destination = agent.add_remote_agent(bytes.fromhex(there["metadata"]))
    ours = agent.get_xfer_descs([(memory.ctypes.data, _SIZE_BYTES, 0)], "DRAM")
    theirs = agent.get_xfer_descs([(there["address"], _SIZE_BYTES, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", ours, theirs, destination)
    _write_once(agent, handle)  # connects, which takes longer than all the rest
    began_s = time.perf_counter()
    for _ in range(_ROUNDS):
        _write_once(agent, handle)
    elapsed_s = time.perf_counter() - began_s
    agent.release_xfer_handle(handle)
    yield {"gigabytes_per_s": _ROUNDS * _SIZE_BYTES / elapsed_s / 1e9}


def _write_once(agent: Any, handle: Any) -> None:
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"a write ended in state {state}")


def _load_nixl() -> ModuleType:
    for package in NIXL_PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    raise ImportError(f"none of {', '.join(NIXL_PACKAGES)} is installed")


def _new_agent(interface: ModuleType, name: str) -> Any:
    return interface.nixl_agent(name, interface.nixl_agent_config(enable_prog_thread=False))


PROBES: dict[str, Callable[[], Iterator[Facts]]] = {
    "engine": probe_engine,
    "nixl": probe_nixl,
    "transfer": probe_transfer,
    "peer": probe_peer,
}

if __name__ == "__main__":
    for facts in PROBES[sys.argv[1]]():
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
