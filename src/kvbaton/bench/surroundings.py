"""Where figures were made: versions, processor, date, command; and what the processor is good at.

Invariant: looks at package metadata and /proc only; nothing is imported to learn its version.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from kvbaton.bench.records import Environment
from kvbaton.launch.machine import Device, Machine, this_machine
from kvbaton.launch.supervisor import Instance

_PACKAGES = ("kvbaton", "vllm", "torch", "nixl-cu12", "nixl")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
_CPUINFO = Path("/proc/cpuinfo")
_UNKNOWN_VOCABULARY_TOKENS = 1000
"""Every real vocabulary has as many ordinary tokens, wherever the model is kept."""


class _ModelConfig(msgspec.Struct, frozen=True):
    vocab_size: int = _UNKNOWN_VOCABULARY_TOKENS


def environment(command: Sequence[str], num_cores: int) -> Environment:
    """As it is now."""
    return Environment(
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=" ".join(["kvbaton", *command]),
        machine=f"{_cpu_field('model name') or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        num_cores=num_cores,
        versions={"python": platform.python_version(), **versions()},
        load_at_start=round(os.getloadavg()[0], 2),
    )


def bench_machine() -> Machine:
    """What engines may use here: all cores, or the first GPU, which a pair shares so that one engine alone has as much."""
    machine = this_machine()
    if "cpu" in versions().get("vllm", ""):
        machine = machine.with_device(Device.CPU)  # a GPU is no use to vLLM's CPU build
    return msgspec.structs.replace(machine, gpus=machine.gpus[:1])


def computes_bfloat16() -> bool:
    """Whether the processor has instructions for it; without, it is emulated and several times slower than float32."""
    flags = _cpu_field("flags") or _cpu_field("Features")
    return bool(_BFLOAT16 & set(flags.split()))


def vocabulary_tokens(model: str) -> int:
    """The size in the model's own configuration; for a model that is not here, one that is small enough for any."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return _UNKNOWN_VOCABULARY_TOKENS
    try:
        return msgspec.json.decode(config.read_bytes(), type=_ModelConfig).vocab_size
    except msgspec.DecodeError:
        return _UNKNOWN_VOCABULARY_TOKENS


def cpu_s(instances: Iterable[Instance]) -> float:
    """Processor time that engines have used so far, all their processes together."""
    total_s = 0.0
    for instance in instances:
        for pid in instance.pids:
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            total_s += times.user + times.system
    return total_s


def versions() -> dict[str, str]:
    """Of the packages that figures depend on, where they are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_field(name: str) -> str:
    if not _CPUINFO.is_file():
        return ""
    lines = _CPUINFO.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
