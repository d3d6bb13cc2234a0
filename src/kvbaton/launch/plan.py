"""A spec and a machine become exact command lines, environments and files. Starts nothing.

Invariant: what `--dry-run` prints is what the supervisor runs: argument vector and added environment come from here and
nowhere else. Read `engine_command` for one engine's flags and `supervisor` for how they are run.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbaton.launch.engine_command import engine_argv, engine_env
from kvbaton.launch.machine import Device, Machine, split_cores
from kvbaton.launch.ports import Ports
from kvbaton.launch.remedy import usage_error
from kvbaton.launch.spec import Connector, DeploymentSpec, Role

_DRAIN_S = 5


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process: an engine or the router."""

    name: str
    role: str
    """`prefill`, `decode`, `both` or `router`."""
    host: str
    port: int
    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: str
    trace_path: str | None = None
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    side_channel_port: int | None = None

    @property
    def connect_host(self) -> str:
        """Where this machine reaches it; "every address" is none to connect to."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - recognised, not bound

    @property
    def url(self) -> str:
        host = f"[{self.connect_host}]" if ":" in self.host else self.connect_host
        return f"http://{host}:{self.port}"

    def shell(self) -> str:
        """The command as one shell line, environment first."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that will run. Prefill engines come first."""

    spec: DeploymentSpec
    device: Device
    model_name: str
    engines: tuple[ProcessPlan, ...]
    router: ProcessPlan
    gpus_missing: bool = False
    """The commands are for another machine and cannot run here."""
    warnings: tuple[str, ...] = ()


def build_plan(spec: DeploymentSpec, machine: Machine, ports: Ports | None = None) -> DeploymentPlan:
    """What `spec` means on `machine`. UsageError where it cannot be had there."""
    machine = machine.with_device(spec.device)
    ports = ports or Ports(avoid=spec.fixed_ports)
    _check_block_sizes(spec, machine.device)
    seats = [(Role.PREFILL, index) for index in range(spec.prefill_count)]
    decoder = Role.BOTH if spec.connector is Connector.NONE else Role.DECODE
    seats += [(decoder, index) for index in range(spec.num_decode)]
    warnings: list[str] = []
    cores = _cores_per_engine(spec, machine, [role for role, _ in seats], warnings)
    gpus = _gpus_per_engine(spec, machine, [role for role, _ in seats], warnings)
    router_port = ports.take(spec.host, spec.router_port, what="the router")
    engines = [
        _plan_engine(spec, machine, ports, seat, (role, index), cores[seat], gpus[seat])
        for seat, (role, index) in enumerate(seats)
    ]
    return DeploymentPlan(
        spec=spec,
        device=machine.device,
        model_name=model_name(spec),
        engines=tuple(engines),
        router=_plan_router(spec, machine, router_port, engines),
        gpus_missing=machine.device is not Device.CPU and not machine.gpus,
        warnings=tuple(warnings),
    )


def model_name(spec: DeploymentSpec) -> str:
    """What clients put into `model`."""
    if spec.served_model_name:
        return spec.served_model_name
    # A path, there or elsewhere, is named by its folder; a hub id, owner/name, by all of it.
    path = Path(spec.model)
    return path.resolve().name if path.is_dir() or path.is_absolute() else spec.model


def _plan_engine(
    spec: DeploymentSpec,
    machine: Machine,
    ports: Ports,
    seat: int,
    who: tuple[Role, int],
    cores: tuple[int, ...],
    gpus: tuple[str, ...],
) -> ProcessPlan:
    role, index = who
    name = f"{'engine' if role is Role.BOTH else role.value}-{index}"
    fixed = spec.prefill_ports if role is Role.PREFILL else spec.decode_ports
    draft = ProcessPlan(
        name=name,
        role=role.value,
        host=spec.engine_host,
        port=ports.take(spec.engine_host, fixed[index] if fixed else 0, what=name),
        argv=(),
        env={},
        log_path=_log_path(spec, name),
        trace_path=_trace_path(spec, name) if spec.trace and spec.connector is Connector.BATON else None,
        cores=cores,
        gpus=gpus,
        side_channel_port=_side_channel_port(spec, ports, seat, (name, role)),
    )
    return msgspec.structs.replace(
        draft,
        argv=engine_argv(spec, machine, role, draft, model_name(spec)),
        env=engine_env(spec, machine, role, draft),
    )


def _plan_router(spec: DeploymentSpec, machine: Machine, port: int, engines: Sequence[ProcessPlan]) -> ProcessPlan:
    trace_path = _trace_path(spec, "router") if spec.trace else None
    argv = list(spec.router_command or (machine.python, "-m", "kvbaton", "router"))
    argv += ["--host", spec.host, "--port", str(port)]
    for engine in engines:
        argv += ["--prefill" if engine.role == Role.PREFILL.value else "--decode", engine.url]
    if spec.connector is not Connector.NONE:
        argv += ["--direction", spec.effective_direction.value]
    # Somebody who stops the whole deployment does not want to wait for the longest answer.
    argv += ["--drain", str(_DRAIN_S)]
    if trace_path:
        argv += ["--trace-file", trace_path]
    return ProcessPlan(
        name="router",
        role="router",
        host=spec.host,
        port=port,
        argv=(*argv, *spec.router_args),
        env={},
        log_path=_log_path(spec, "router"),
        trace_path=trace_path,
    )


def _log_path(spec: DeploymentSpec, name: str) -> str:
    folder = Path(spec.log_dir) if spec.log_dir else Path(spec.state_dir) / "logs"
    return str(folder.absolute() / f"{name}.log")


def _trace_path(spec: DeploymentSpec, name: str) -> str:
    return str((Path(spec.state_dir) / "traces").absolute() / f"{name}.jsonl")


def _side_channel_port(spec: DeploymentSpec, ports: Ports, seat: int, who: tuple[str, Role]) -> int | None:
    """Of the engine's first rank; the others use the ports after it."""
    if spec.connector is Connector.NONE:
        return None
    fixed = spec.side_channel_ports[seat] if spec.side_channel_ports else 0
    what, num_ranks = f"the side channel of {who[0]}", spec.num_ranks_of(who[1])
    if spec.connector is Connector.BATON and not fixed:
        if num_ranks > 1:
            return ports.take_run(spec.side_channel_host, num_ranks, what=what)
        return 0  # our side channel binds any free port and announces it in P's answer
    return ports.take(spec.side_channel_host, fixed, what=what)


def _cores_per_engine(
    spec: DeploymentSpec, machine: Machine, roles: Sequence[Role], warnings: list[str]
) -> list[tuple[int, ...]]:
    if machine.device is not Device.CPU:
        return [()] * len(roles)
    pool = spec.cores or machine.cores
    chosen = [core for group in (spec.cores, spec.prefill_cores, spec.decode_cores) for core in group or ()]
    missing = sorted(set(chosen) - set(machine.cores))
    if missing:
        raise usage_error(
            f"cores: {', '.join(map(str, missing))} not usable here",
            f"This process may use {len(machine.cores)}: {', '.join(map(str, machine.cores))}.",
        )
    if not spec.pin:
        return [tuple(pool)] * len(roles)
    shares = list(split_cores(pool, len(roles)))
    for group, wanted in ((spec.prefill_cores, {Role.PREFILL}), (spec.decode_cores, {Role.DECODE, Role.BOTH})):
        seats = [seat for seat, role in enumerate(roles) if role in wanted]
        if group and seats:
            for seat, share in zip(seats, split_cores(group, len(seats)), strict=True):
                shares[seat] = share
    shared = len([core for share in shares for core in share]) > len({core for share in shares for core in share})
    if shared:
        warnings.append(f"{len(roles)} engines share cores: expect each to wait for the others")
    return shares


def _gpus_per_engine(
    spec: DeploymentSpec, machine: Machine, roles: Sequence[Role], warnings: list[str]
) -> list[tuple[str, ...]]:
    if machine.device is Device.CPU:
        return [()] * len(roles)
    sizes = [spec.num_ranks_of(role) for role in roles]
    gpus = machine.gpus
    if not gpus:
        warnings.append(
            f"no {machine.device.value} GPU was found here: the commands are for a machine with {sum(sizes)}"
        )
        gpus = tuple(str(index) for index in range(sum(sizes)))
    if spec.share_gpus:
        if max(sizes) > len(gpus):
            raise usage_error(
                f"engines of {max(sizes)} ranks on {len(gpus)} GPUs",
                "Lower --tp or --prefill-pp: ranks of one engine need a GPU each.",
            )
        return [
            tuple(gpus[(sum(sizes[:seat]) + rank) % len(gpus)] for rank in range(size))
            for seat, size in enumerate(sizes)
        ]
    if sum(sizes) > len(gpus):
        raise usage_error(
            f"{len(roles)} engines need {sum(sizes)} GPUs, {len(gpus)} are visible",
            "Lower --prefill, --decode, --tp or --prefill-pp, or let engines share GPUs with --share-gpus.",
        )
    return [tuple(gpus[sum(sizes[:seat]) : sum(sizes[: seat + 1])]) for seat in range(len(roles))]


def _check_block_sizes(spec: DeploymentSpec, device: Device) -> None:
    if device is not Device.CPU:
        return
    flag = "--block-size"
    for role in Role:
        given = spec.extra_args_of(role)
        sizes = [value for name, value in itertools.pairwise(given) if name == flag]
        sizes += [arg.removeprefix(f"{flag}=") for arg in given if arg.startswith(f"{flag}=")]
        if spec.block_size is not None:
            sizes.append(str(spec.block_size))
        for size in sizes:
            if not size.isdecimal() or int(size) % 32:
                raise usage_error(
                    f"block size {size}: vLLM's CPU attention needs a multiple of 32",
                    f"Use {flag} 32, 64, 96, ...",
                )
