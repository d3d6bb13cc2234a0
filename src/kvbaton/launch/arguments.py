"""The flags of `kvbaton up` as a `DeploymentSpec`.

Invariant: every mistake in a flag is a UsageError that names the flag. Read `kvbaton.cli` for the flags themselves and
`spec` for what they mean.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import msgspec

from kvbaton.launch.machine import Device, parse_cores
from kvbaton.launch.ports import preferred
from kvbaton.launch.remedy import usage_error
from kvbaton.launch.spec import Connector, DeploymentSpec
from kvbaton.types import Direction

_DEFAULT_ROUTER_PORT = 8000


def spec_from(flags: argparse.Namespace, model: str) -> DeploymentSpec:
    """What the command line asks for; `model` is already a folder or a hub id."""
    return DeploymentSpec(
        model=model,
        served_model_name=flags.served_model_name,
        name=flags.name,
        run_dir=str(Path(flags.state_dir) / flags.name),
        log_dir=flags.log_dir,
        connector=Connector(flags.connector),
        direction=Direction(flags.mode),
        num_prefill=flags.prefill,
        num_decode=flags.decode,
        tp=flags.tp,
        prefill_tp=flags.prefill_tp,
        decode_tp=flags.decode_tp,
        prefill_pp=flags.prefill_pp,
        device=Device(flags.device),
        share_gpus=flags.share_gpus,
        cores=_cores(flags.cores),
        prefill_cores=_cores(flags.prefill_cores),
        decode_cores=_cores(flags.decode_cores),
        pin=not flags.no_pin,
        host=flags.host,
        engine_host=flags.engine_host,
        router_port=preferred(flags.host, _DEFAULT_ROUTER_PORT) if flags.port is None else flags.port,
        prefill_ports=_ports("--prefill-ports", flags.prefill_ports),
        decode_ports=_ports("--decode-ports", flags.decode_ports),
        side_channel_host=flags.side_channel_host,
        side_channel_ports=_ports("--side-channel-ports", flags.side_channel_ports),
        kv_cache_gib=flags.kv_cache_gib,
        block_size=flags.block_size,
        max_model_len=flags.max_model_len,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        dtype=flags.dtype,
        executor=flags.executor,
        engine_args=_words("--engine-args", flags.engine_args),
        prefill_args=_words("--prefill-args", flags.prefill_args),
        decode_args=_words("--decode-args", flags.decode_args),
        router_args=_words("--router-args", flags.router_args),
        engine_env=_environment(flags.env),
        kv_load_failure_policy=flags.kv_load_failure_policy,
        connector_config=_connector_config(flags.connector_config),
        trace=not flags.no_trace,
        startup_timeout_s=flags.startup_timeout,
        engine_command=_words("--engine-command", flags.engine_command) or None,
        router_command=_words("--router-command", flags.router_command) or None,
    )


def _cores(text: str | None) -> tuple[int, ...] | None:
    return parse_cores(text) if text else None


def _ports(flag: str, text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise usage_error(f"{flag}: {text!r} is not a list of ports", "Write one per engine, as in 8100,8101.")
    return tuple(int(part) for part in parts)


def _words(flag: str, texts: list[str] | None) -> tuple[str, ...]:
    """Each text split as a shell would."""
    try:
        return tuple(word for text in texts or () for word in shlex.split(text))
    except ValueError as error:
        raise usage_error(f"{flag}: {error}", "Quote the arguments as in a shell.") from None


def _environment(settings: list[str] | None) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise usage_error(f"--env: {name!r} has no value", "Write --env NAME=VALUE.")
    return {name: value for name, _, value in pairs}


def _connector_config(text: str | None) -> dict[str, object]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, object])
    except msgspec.DecodeError as error:
        raise usage_error(f"--connector-config: {error}", """Write a JSON object, as in '{"lease_s": 30}'.""") from None
