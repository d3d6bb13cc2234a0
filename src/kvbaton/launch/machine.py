"""What this machine offers: cores, accelerators, tools. Looks at files only; never loads torch or a driver library.

Invariant: everything a plan depends on is in one frozen `Machine`, so plans can be built, and tested, for a machine
that is not this one. Read `plan` next.
"""

from __future__ import annotations

import enum
import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbaton.launch.remedy import usage_error

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class Device(enum.Enum):
    """What the engines compute on. AUTO is resolved before a plan is built."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The facts a plan is built from."""

    cores: tuple[int, ...]
    device: Device
    gpus: tuple[str, ...] = ()
    taskset: str | None = None
    vllm: str = "vllm"
    python: str = sys.executable

    def with_device(self, wanted: Device) -> Machine:
        """The same machine seen as one of the `wanted` kind; AUTO keeps what was found."""
        if wanted is Device.AUTO or wanted is self.device:
            return self
        return msgspec.structs.replace(self, device=wanted, gpus=())


def this_machine() -> Machine:
    """What was found here."""
    device, gpus = _accelerators()
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        device=device,
        gpus=gpus,
        taskset=shutil.which("taskset"),
        vllm=_vllm_program(),
    )


def _accelerators() -> tuple[Device, tuple[str, ...]]:
    for device, found, variables in (
        (Device.CUDA, _nvidia_gpus(), ("CUDA_VISIBLE_DEVICES",)),
        (Device.ROCM, _amd_gpus(), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    ):
        if found:
            visible = next((os.environ[name] for name in variables if os.environ.get(name)), None)
            return device, tuple(visible.split(",")) if visible else found
    return Device.CPU, ()


def _nvidia_gpus() -> tuple[str, ...]:
    if not _NVIDIA.is_dir():
        # Containers may hide /proc/driver: the device nodes are what the driver opens.
        nodes = [node.name.removeprefix("nvidia") for node in Path("/dev").glob("nvidia[0-9]*")]
        return tuple(sorted(nodes, key=int))
    return tuple(str(index) for index, _ in enumerate(sorted(_NVIDIA.iterdir())))


def _amd_gpus() -> tuple[str, ...]:
    # A node without SIMD units is a CPU.
    gpus = 0
    for properties in sorted(_KFD_NODES.glob("*/properties")):
        try:
            lines = properties.read_text().splitlines()
        except OSError:
            continue
        gpus += any(line.startswith("simd_count ") and line.split()[1] != "0" for line in lines)
    return tuple(str(index) for index in range(gpus))


def _vllm_program() -> str:
    # The one beside our Python belongs to the same environment; PATH may lead to another.
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.is_file() else shutil.which("vllm") or "vllm"


def parse_cores(text: str) -> tuple[int, ...]:
    """`0-3,6` as (0, 1, 2, 3, 6)."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise usage_error(f"cores: {text!r} is not a list of cores", "Write cores like 0-3 or 0,2,4.")
        cores.extend(range(int(first), int(last or first) + 1))
    if not cores or len(set(cores)) != len(cores):
        raise usage_error(f"cores: {text!r} is empty or names a core twice", "Write cores like 0-3 or 0,2,4.")
    return tuple(cores)


def format_cores(cores: Sequence[int]) -> str:
    """(0, 1, 2, 3, 6) as `0-3,6`, the form taskset and vLLM read."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def split_cores(cores: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """`cores` cut into `parts` runs as equal as can be, longer ones first; with too few cores, parts share them."""
    if parts > len(cores):
        return tuple((cores[index % len(cores)],) for index in range(parts))
    size, extra = divmod(len(cores), parts)
    cuts = [index * size + min(index, extra) for index in range(parts + 1)]
    return tuple(tuple(cores[start:end]) for start, end in itertools.pairwise(cuts))
