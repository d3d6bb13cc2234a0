"""One engine's argument vector and the environment variables we add to it.

Invariant: the user's own arguments come last, so that they win. CPU flags are facts about vLLM's CPU build, each with
its reason; a GPU command line carries none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from kvbaton.launch.machine import Device, Machine, format_cores, split_cores
from kvbaton.launch.spec import Connector, DeploymentSpec, Role
from kvbaton.launch.state import RunDir

_GIB = 1 << 30
_CPU_BLOCK_SIZE = 32
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_IN_TREE = {Connector.NIXL_PULL: "NixlConnector", Connector.NIXL_PUSH: "NixlPushConnector"}


class Seat(Protocol):
    """What an engine has been given on this machine."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def cores(self) -> tuple[int, ...]: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...
    @property
    def side_channel_port(self) -> int | None: ...
    @property
    def trace_path(self) -> str | None: ...


def engine_argv(spec: DeploymentSpec, machine: Machine, role: Role, seat: Seat, model_name: str) -> tuple[str, ...]:
    """The engine's command, pinned to its cores where it has some."""
    argv = [*_pinning(spec, machine, seat), *(spec.engine_command or (machine.vllm, "serve")), spec.model]
    argv += ["--host", seat.host, "--port", str(seat.port), "--served-model-name", model_name]
    argv += _sizes(spec, machine.device, role)
    config = kv_transfer_config(spec, role, seat)
    if config:
        argv += ["--kv-transfer-config", msgspec.json.encode(config).decode()]
    return (*argv, *spec.extra_args_of(role))


def engine_env(spec: DeploymentSpec, machine: Machine, role: Role, seat: Seat) -> dict[str, str]:
    """The variables we add; everything else is inherited."""
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if machine.device is Device.CPU:
        env |= _cpu_env(spec, role, seat)
    elif machine.device is Device.CUDA:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
    else:
        env["HIP_VISIBLE_DEVICES"] = ",".join(seat.gpus)
    if spec.connector in _IN_TREE:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.side_channel_host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(seat.side_channel_port)
    return env | spec.engine_env


def kv_transfer_config(spec: DeploymentSpec, role: Role, seat: Seat) -> dict[str, object]:
    """The value of `--kv-transfer-config`; empty without a connector."""
    if spec.connector is Connector.NONE:
        return {}
    config: dict[str, object] = {"kv_connector": _IN_TREE.get(spec.connector, "BatonConnector")}
    extra: dict[str, object] = {}
    if spec.connector is Connector.BATON:
        config["kv_connector_module_path"] = "kvbaton.connector"
        extra = {"side_channel_host": spec.side_channel_host, "side_channel_port": seat.side_channel_port}
        if spec.makes_own_key:
            extra["cluster_key_file"] = str(RunDir(spec.state_dir).key_path)
        if seat.trace_path:
            extra["trace_path"] = seat.trace_path
    config |= {"kv_role": _KV_ROLE[role], "kv_load_failure_policy": spec.kv_load_failure_policy}
    extra |= spec.connector_config
    if extra:
        config["kv_connector_extra_config"] = extra
    return config


def executor_of(spec: DeploymentSpec, device: Device, role: Role) -> str | None:
    """One process per engine on a CPU: vLLM's multi-process executor spins in sched_yield after each step."""
    if spec.executor or device is not Device.CPU:
        return spec.executor
    return "uni" if spec.num_ranks_of(role) == 1 else "mp"


def _sizes(spec: DeploymentSpec, device: Device, role: Role) -> list[str]:
    cpu = device is Device.CPU
    flags: list[tuple[str, object]] = [
        ("--dtype", spec.dtype or ("bfloat16" if cpu else None)),
        ("--block-size", spec.block_size or (_CPU_BLOCK_SIZE if cpu else None)),
        ("--distributed-executor-backend", executor_of(spec, device, role)),
        ("--tensor-parallel-size", spec.tp_of(role) if spec.tp_of(role) > 1 else None),
        ("--pipeline-parallel-size", spec.pp_of(role) if spec.pp_of(role) > 1 else None),
        ("--max-model-len", spec.max_model_len),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
    ]
    if not _kv_space_is_variable(spec, device) and spec.kv_cache_gib is not None:
        flags.append(("--kv-cache-memory-bytes", int(spec.kv_cache_gib * _GIB)))
    elif not cpu and spec.share_gpus:
        share = 0.9 / (spec.prefill_count + spec.num_decode)
        flags.append(("--gpu-memory-utilization", f"{share:.2f}"))
    # Compiling costs minutes at start on a CPU and the gain is small for the models one runs there.
    switches = ["--enforce-eager"] if cpu else []
    return switches + [part for flag, value in flags if value is not None for part in (flag, str(value))]


def _kv_space_is_variable(spec: DeploymentSpec, device: Device) -> bool:
    # The CPU build's variable takes whole GiB only; anything finer goes through the flag.
    return device is Device.CPU and (spec.kv_cache_gib is None or float(spec.kv_cache_gib).is_integer())


def _cpu_env(spec: DeploymentSpec, role: Role, seat: Seat) -> dict[str, str]:
    env: dict[str, str] = {}
    if _kv_space_is_variable(spec, Device.CPU):
        env["VLLM_CPU_KVCACHE_SPACE"] = str(int(spec.kv_cache_gib or 1))
    if executor_of(spec, Device.CPU, role) == "uni":
        # VLLM_CPU_OMP_THREADS_BIND has no effect in this mode: affinity and thread count do it.
        return env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(seat.cores))}
    num_ranks = spec.num_ranks_of(role)
    if not spec.pin:
        threads = max(1, len(seat.cores) // num_ranks)
        return env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    ranks = split_cores(seat.cores, num_ranks)
    return env | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(format_cores(rank) for rank in ranks)}


def _pinning(spec: DeploymentSpec, machine: Machine, seat: Seat) -> list[str]:
    if not spec.pin or not seat.cores:
        return []
    cores = format_cores(seat.cores)
    if machine.taskset:
        return [machine.taskset, "-c", cores]
    return [machine.python, "-m", "kvbaton.launch.leash", "--cores", cores, "--"]
