"""What is to be deployed, as one frozen, validated value.

Invariant: a `DeploymentSpec` that exists is consistent in itself; what depends on the machine (cores, GPUs, ports) is
checked by `plan`, which turns a spec into command lines. Read `plan` next.
"""

from __future__ import annotations

import enum
import re
from typing import Literal

import msgspec

from kvbaton.launch.machine import Device
from kvbaton.launch.remedy import usage_error
from kvbaton.types import Direction

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Connector(enum.Enum):
    """How KV travels. NONE is the aggregated baseline: every engine prefills and decodes."""

    BATON = "baton"
    NIXL_PULL = "nixl-pull"
    NIXL_PUSH = "nixl-push"
    NONE = "none"


class Role(enum.Enum):
    """What an instance does; the values are those of the state file."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment on one machine. None, 0 and () mean "choose for me" throughout."""

    model: str
    """What `vllm serve` is given: a local folder or a hub id."""
    served_model_name: str | None = None
    name: str = "default"
    connector: Connector = Connector.BATON
    direction: Direction = Direction.PUSH
    """Which side moves the KV; the NIXL connectors have only one each, and theirs wins."""
    num_prefill: int | None = None
    """None is one, or none where every engine does both."""
    num_decode: int = 1
    tp: int = 1
    prefill_tp: int | None = None
    decode_tp: int | None = None
    prefill_pp: int = 1
    """Pipeline stages of each prefill engine."""
    device: Device = Device.AUTO
    share_gpus: bool = False
    """Let several engines use one GPU, each with its share of the memory."""
    cores: tuple[int, ...] | None = None
    prefill_cores: tuple[int, ...] | None = None
    decode_cores: tuple[int, ...] | None = None
    pin: bool = True
    """Keep each engine on its own cores (CPU only)."""
    host: str = "127.0.0.1"
    """Where the router listens. Engines answer anybody who reaches them, so they have an address of their own."""
    engine_host: str = "127.0.0.1"
    router_port: int = 0
    prefill_ports: tuple[int, ...] = ()
    decode_ports: tuple[int, ...] = ()
    side_channel_host: str = "127.0.0.1"
    side_channel_ports: tuple[int, ...] = ()
    """One per engine, prefill first."""
    kv_cache_gib: float | None = None
    """None is 1 GiB on a CPU, and what vLLM finds free on a GPU."""
    block_size: int | None = None
    """None is 32 on a CPU, and vLLM's choice on a GPU."""
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str | None = None
    executor: Literal["uni", "mp"] | None = None
    """None is `uni` (engine core and worker in one process) for one rank on a CPU; vLLM's choice elsewhere."""
    engine_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    engine_env: dict[str, str] = {}
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    connector_config: dict[str, object] = {}
    """Further keys of `kv_connector_extra_config`."""
    router_args: tuple[str, ...] = ()
    trace: bool = True
    run_dir: str | None = None
    """Where state, logs and traces go. None is `.kvbaton/<name>`."""
    log_dir: str | None = None
    startup_timeout_s: float = 600.0
    stop_timeout_s: float = 15.0
    engine_command: tuple[str, ...] | None = None
    """In place of `vllm serve`; for tests."""
    router_command: tuple[str, ...] | None = None
    """In place of `kvbaton router`; for tests."""

    def __post_init__(self) -> None:
        self._check_name_and_counts()
        self._check_ranks()
        self._check_ports()
        self._check_sizes()

    @property
    def prefill_count(self) -> int:
        if self.num_prefill is not None:
            return self.num_prefill
        return 0 if self.connector is Connector.NONE else 1

    @property
    def effective_direction(self) -> Direction:
        """The direction the router speaks; an in-tree connector dictates it."""
        forced = {Connector.NIXL_PULL: Direction.PULL, Connector.NIXL_PUSH: Direction.PUSH}
        return forced.get(self.connector, self.direction)

    @property
    def state_dir(self) -> str:
        return self.run_dir or f".kvbaton/{self.name}"

    @property
    def makes_own_key(self) -> bool:
        """The launcher makes the engines a cluster key, and removes it at the end."""
        return self.connector is Connector.BATON and "cluster_key_file" not in self.connector_config

    @property
    def fixed_ports(self) -> list[int]:
        ports = (self.router_port, *self.prefill_ports, *self.decode_ports, *self.side_channel_ports)
        return [port for port in ports if port]

    def tp_of(self, role: Role) -> int:
        return (self.prefill_tp if role is Role.PREFILL else self.decode_tp) or self.tp

    def num_ranks_of(self, role: Role) -> int:
        """Worker processes, and GPUs, of one engine."""
        return self.tp_of(role) * self.pp_of(role)

    def pp_of(self, role: Role) -> int:
        return self.prefill_pp if role is Role.PREFILL else 1

    def extra_args_of(self, role: Role) -> tuple[str, ...]:
        """What the user adds to the command line of `role`, the more specific last, so that it wins."""
        return self.engine_args + (self.prefill_args if role is Role.PREFILL else self.decode_args)

    def _check_name_and_counts(self) -> None:
        if not self.model:
            raise usage_error("model: the name is empty", "Name a prepared model, a folder or a hub id.")
        if not _NAME.fullmatch(self.name):
            raise usage_error(f"name: {self.name!r} cannot be a folder name", "Use letters, digits, '.', '_' and '-'.")
        if self.connector is Connector.NONE:
            given = (self.num_prefill, self.prefill_tp, self.prefill_cores, self.prefill_ports, self.prefill_args)
            if any(given):
                raise usage_error(
                    "connector none: there are no prefill engines, since nothing can be handed over",
                    "Leave the --prefill flags away; --decode and its flags are for the engines that do both.",
                )
        elif self.prefill_count < 1:
            raise usage_error(f"prefill: {self.prefill_count} engines", "Give at least one, or --connector none.")
        if self.num_decode < 1:
            raise usage_error(f"decode: {self.num_decode} engines", "Give at least one.")

    def _check_ranks(self) -> None:
        for what, size in (("tp", self.tp), ("prefill tp", self.prefill_tp), ("decode tp", self.decode_tp)):
            if size is not None and size < 1:
                raise usage_error(f"{what}: {size} ranks", "Give at least one.")
        if self.prefill_pp < 1:
            raise usage_error(f"prefill pp: {self.prefill_pp} stages", "Give at least one.")
        if self.prefill_pp > 1 and self.connector is not Connector.BATON:
            raise usage_error(
                f"prefill pp: {self.prefill_pp} stages with connector {self.connector.value}",
                "Pipeline stages on the prefill side go with --connector baton.",
            )

    def _check_ports(self) -> None:
        for what, ports, count in (
            ("prefill ports", self.prefill_ports, self.prefill_count),
            ("decode ports", self.decode_ports, self.num_decode),
            ("side-channel ports", self.side_channel_ports, self.prefill_count + self.num_decode),
        ):
            if ports and len(ports) != count:
                raise usage_error(f"{what}: {len(ports)} given for {count} engines", f"Give {count}, or none.")
        fixed = self.fixed_ports
        for port in fixed:
            if not 0 < port < 65536:
                raise usage_error(f"port {port} does not exist", "Use 1 to 65535, or 0 for a free one.")
            if fixed.count(port) > 1:
                raise usage_error(f"port {port} is given twice", "Give every engine and the router a port of its own.")

    def _check_sizes(self) -> None:
        for what, size in (
            ("kv cache", self.kv_cache_gib),
            ("block size", self.block_size),
            ("max model len", self.max_model_len),
            ("max num batched tokens", self.max_num_batched_tokens),
            ("startup timeout", self.startup_timeout_s),
            ("stop timeout", self.stop_timeout_s),
        ):
            if size is not None and size <= 0:
                raise usage_error(f"{what}: {size} is not positive", "Give a number above zero.")
        for role in Role:
            if self.executor == "uni" and self.num_ranks_of(role) > 1:
                raise usage_error(
                    f"executor uni with {self.num_ranks_of(role)} ranks: it runs one rank only",
                    "Use --executor mp, or one rank per engine.",
                )
