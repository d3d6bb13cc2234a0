"""The ways of serving that are compared, and the deployment that each one is.

Invariant: modes differ in what their name says and in nothing else: model, executor, cores per engine, dtype and sizes
come from one `Setup`. Read `hand_edit` for what "hand-edited" means.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvbaton.errors import UsageError
from kvbaton.launch.machine import Device, Machine
from kvbaton.launch.spec import Connector, DeploymentSpec
from kvbaton.types import Direction


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One way of serving."""

    name: str
    title: str
    connector: Connector
    direction: Direction = Direction.PUSH
    is_on_one_core: bool = False
    """An aggregated engine that has what one of the pair's engines has, and not what both have."""
    is_hand_edited: bool = False

    @property
    def is_in_tree(self) -> bool:
        return self.connector in (Connector.NIXL_PULL, Connector.NIXL_PUSH)

    @property
    def is_pair(self) -> bool:
        return self.connector is not Connector.NONE


AGGREGATED = Mode(name="aggregated", title="one engine, all cores", connector=Connector.NONE)
AGGREGATED_ONE_CORE = Mode(
    name="aggregated-1core", title="one engine, one core", connector=Connector.NONE, is_on_one_core=True
)
KVBATON_PUSH = Mode(name="kvbaton-push", title="kvbaton push", connector=Connector.BATON)
KVBATON_PULL = Mode(name="kvbaton-pull", title="kvbaton pull", connector=Connector.BATON, direction=Direction.PULL)
MODES = (
    AGGREGATED_ONE_CORE,
    AGGREGATED,
    KVBATON_PUSH,
    KVBATON_PULL,
    Mode(name="nixl-pull", title="vLLM NixlConnector, as shipped", connector=Connector.NIXL_PULL),
    Mode(
        name="nixl-pull-edited",
        title="vLLM NixlConnector, NIXL hand-edited",
        connector=Connector.NIXL_PULL,
        is_hand_edited=True,
    ),
    Mode(name="nixl-push", title="vLLM NixlPushConnector, as shipped", connector=Connector.NIXL_PUSH),
    Mode(
        name="nixl-push-edited",
        title="vLLM NixlPushConnector, NIXL hand-edited",
        connector=Connector.NIXL_PUSH,
        is_hand_edited=True,
    ),
)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all modes of one comparison share."""

    model: str
    state_root: Path
    machine: Machine
    cores: tuple[int, ...]
    """P's cores, then D's; an aggregated engine has them all."""
    dtype: str | None = None
    engine_args: tuple[str, ...] = ()
    startup_timeout_s: float = 600.0
    trace: bool = False
    engine_command: tuple[str, ...] | None = None
    router_command: tuple[str, ...] | None = None


def modes_named(names: str) -> tuple[Mode, ...]:
    """Modes by comma-separated names, in that order. UsageError for one that does not exist, or twice."""
    known = {mode.name: mode for mode in MODES}
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise UsageError(f"--modes: {name!r} is unknown. Modes: {', '.join(known)}")
        if chosen.count(name) > 1:
            raise UsageError(f"--modes: {name!r} is given twice")
    return tuple(known[name] for name in chosen)


def cores_of(mode: Mode, setup: Setup) -> tuple[int, ...]:
    """All cores that `mode` computes on."""
    return setup.cores[:1] if mode.is_on_one_core else setup.cores


def cores_text(mode: Mode, setup: Setup) -> str:
    """`1 + 1` for a pair, else a number; a GPU is one for all."""
    if setup.machine.device is not Device.CPU:
        return "1 GPU"
    num_cores = len(cores_of(mode, setup))
    if not mode.is_pair:
        return str(num_cores)
    half = -(-num_cores // 2)
    return f"{half} + {num_cores - half}" if num_cores > 1 else "1, shared"


def spec_of(mode: Mode, setup: Setup, extra_env: dict[str, str] | None = None) -> DeploymentSpec:
    """The deployment that `mode` is under `setup`."""
    name = f"bench-{mode.name}"
    return DeploymentSpec(
        model=setup.model,
        name=name,
        run_dir=str(setup.state_root / name),
        connector=mode.connector,
        direction=mode.direction,
        device=setup.machine.device,
        share_gpus=mode.is_pair and setup.machine.device is not Device.CPU,
        cores=cores_of(mode, setup),
        dtype=setup.dtype,
        executor="uni",
        engine_args=setup.engine_args,
        engine_env=extra_env or {},
        trace=setup.trace,
        startup_timeout_s=setup.startup_timeout_s,
        engine_command=setup.engine_command,
        router_command=setup.router_command,
    )
