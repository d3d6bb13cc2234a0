"""What a deployment description accepts and refuses."""

from __future__ import annotations

import pytest

from kvbaton.errors import UsageError
from kvbaton.launch.machine import format_cores, parse_cores, split_cores
from kvbaton.launch.spec import Connector, DeploymentSpec, Role
from kvbaton.types import Direction


def test_defaults_are_one_prefill_one_decode_push() -> None:
    spec = DeploymentSpec(model="tiny")
    assert (spec.prefill_count, spec.num_decode) == (1, 1)
    assert spec.effective_direction is Direction.PUSH
    assert spec.state_dir == ".kvbaton/default"


def test_an_in_tree_connector_dictates_the_direction() -> None:
    spec = DeploymentSpec(model="tiny", connector=Connector.NIXL_PULL, direction=Direction.PUSH)
    assert spec.effective_direction is Direction.PULL
    spec = DeploymentSpec(model="tiny", connector=Connector.NIXL_PUSH, direction=Direction.PULL)
    assert spec.effective_direction is Direction.PUSH


def test_without_connector_there_are_no_prefill_engines() -> None:
    assert DeploymentSpec(model="tiny", connector=Connector.NONE).prefill_count == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": ""}, "model"),
        ({"name": "a/b"}, "name"),
        ({"name": "../up"}, "name"),
        ({"num_prefill": 0}, "prefill"),
        ({"num_decode": 0}, "decode"),
        ({"tp": 0}, "tp"),
        ({"connector": Connector.NONE, "num_prefill": 1}, "connector none"),
        ({"connector": Connector.NONE, "prefill_args": ("--seed", "1")}, "connector none"),
        ({"prefill_ports": (1, 2)}, "prefill ports"),
        ({"router_port": 70000}, "70000"),
        ({"router_port": 8000, "decode_ports": (8000,)}, "8000"),
        ({"kv_cache_gib": 0.0}, "kv cache"),
        ({"block_size": -1}, "block size"),
        ({"startup_timeout_s": 0.0}, "startup timeout"),
        ({"executor": "uni", "tp": 2}, "executor uni"),
        ({"executor": "uni", "prefill_pp": 2}, "executor uni with 2 ranks"),
        ({"prefill_pp": 0}, "prefill pp: 0 stages"),
        ({"prefill_pp": 2, "connector": Connector.NIXL_PUSH}, "prefill pp: 2 stages with connector nixl-push"),
    ],
)
def test_a_mistake_is_refused_by_name_with_a_remedy(fields: dict[str, object], named: str) -> None:
    values: dict[str, object] = {"model": "tiny"} | fields
    with pytest.raises(UsageError, match=named) as refused:
        DeploymentSpec(**values)  # type: ignore[arg-type]
    assert refused.value.__notes__


def test_pipeline_stages_are_of_prefill_engines() -> None:
    spec = DeploymentSpec(model="tiny", prefill_tp=2, prefill_pp=3)
    assert [spec.num_ranks_of(role) for role in (Role.PREFILL, Role.DECODE)] == [6, 1]


def test_tp_and_arguments_by_role_the_more_specific_last() -> None:
    spec = DeploymentSpec(model="tiny", tp=2, decode_tp=4, engine_args=("--seed", "1"), decode_args=("--seed", "2"))
    assert [spec.tp_of(role) for role in (Role.PREFILL, Role.DECODE)] == [2, 4]
    assert [spec.num_ranks_of(role) for role in (Role.PREFILL, Role.DECODE)] == [2, 4]
    assert spec.extra_args_of(Role.PREFILL) == ("--seed", "1")
    assert spec.extra_args_of(Role.DECODE) == ("--seed", "1", "--seed", "2")


@pytest.mark.parametrize(
    ("cores", "parts", "shares"),
    [
        (range(2), 2, ((0,), (1,))),
        (range(8), 2, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (range(5), 2, ((0, 1, 2), (3, 4))),
        ((4, 6, 9), 1, ((4, 6, 9),)),
        ((3,), 2, ((3,), (3,))),
        (range(2), 3, ((0,), (1,), (0,))),
    ],
)
def test_cores_are_split_evenly_earlier_parts_first(
    cores: range | tuple[int, ...], parts: int, shares: tuple[tuple[int, ...], ...]
) -> None:
    assert split_cores(tuple(cores), parts) == shares


def test_core_lists_survive_a_round_trip() -> None:
    assert parse_cores("0-3, 6,8-9") == (0, 1, 2, 3, 6, 8, 9)
    assert format_cores((0, 1, 2, 3, 6, 8, 9)) == "0-3,6,8-9"


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1,1", "0--2"])
def test_a_bad_core_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cores"):
        parse_cores(text)
