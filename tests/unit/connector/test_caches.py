"""vLLM's caches as a layout, and the refusal of what cannot be served. Real tensors, doubles of the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch

from kvbaton.connector.caches import describe_caches, refuse_unsupported
from kvbaton.errors import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NUM_BLOCKS = 6


class FullAttentionSpec:
    block_size = 16


class MambaSpec:
    block_size = 16


class UniformSpec:
    """A group whose layers differ wraps one spec per layer."""

    block_size = 16

    def __init__(self, *specs: object) -> None:
        self.kv_cache_specs = dict(enumerate(specs))


def config(**changed: Any) -> VllmConfig:
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="tiny"),
        get_total_num_hidden_layers=lambda: 2,
        get_num_kv_heads=lambda _parallel: 2,
        get_head_size=lambda: 4,
    )
    speculative = changed.pop("speculative_config", None)
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | changed)), speculative_config=speculative, model_config=model
    )
    return cast("VllmConfig", made)


def cache_config(*specs: object, layers: tuple[str, ...] = ("layer.0", "layer.1")) -> KVCacheConfig:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers)) for spec in specs or (FullAttentionSpec(),)]
    made = SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS, kv_cache_layout="LBNHC")
    return cast("KVCacheConfig", made)


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.zeros(NUM_BLOCKS, 16, 2, 8, dtype=torch.bfloat16) for i in (1, 0)}


def test_a_layer_is_a_region_and_an_allocation_a_span() -> None:
    caches = tensors()
    layout, spans = describe_caches(config(), cache_config(), caches, tp_rank=0)
    layout.validate()
    assert [region.layer for region in layout.regions] == ["layer.0", "layer.1"]
    assert [region.base_address for region in layout.regions] == [caches[f"layer.{i}"].data_ptr() for i in (0, 1)]
    assert {(r.block_bytes, r.block_stride_bytes, r.num_blocks) for r in layout.regions} == {(512, 512, NUM_BLOCKS)}
    assert (layout.dtype, layout.memory_kind, layout.block_size_tokens) == ("bfloat16", "DRAM", (16,))
    assert {span.address for span in spans} == {each.data_ptr() for each in caches.values()}
    assert {span.num_bytes for span in spans} == {NUM_BLOCKS * 512}


def test_layers_of_one_allocation_are_registered_once_and_every_region_lies_inside() -> None:
    whole = torch.zeros(NUM_BLOCKS, 2, 16, 2, 8, dtype=torch.bfloat16)
    caches = {f"layer.{i}": whole[:, i] for i in (0, 1)}
    layout, (span,) = describe_caches(config(), cache_config(), caches, tp_rank=0)
    layout.validate()
    assert {region.block_stride_bytes for region in layout.regions} == {1024}
    for region in layout.regions:
        assert span.address <= region.base_address
        assert region.end_address <= span.address + span.num_bytes


def test_tensors_of_layers_in_no_group_are_left_out() -> None:
    caches = tensors() | {"cross": torch.zeros(1)}
    layout, _ = describe_caches(config(), cache_config(), caches, tp_rank=0)
    assert [region.layer for region in layout.regions] == ["layer.0", "layer.1"]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, NUM_BLOCKS, 16), torch.zeros(NUM_BLOCKS, 16, 8).transpose(1, 2), torch.zeros(NUM_BLOCKS + 1, 16)],
    ids=["keys and values first", "a block in pieces", "more blocks than configured"],
)
def test_blocks_that_do_not_lie_in_one_piece_along_the_first_axis_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match=r"layer\.0.*Choose another attention backend"):
        describe_caches(config(), cache_config(layers=("layer.0",)), {"layer.0": tensor}, tp_rank=0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism of size 2"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        refuse_unsupported(config(**changed), cache_config())


@pytest.mark.parametrize("specs", [(MambaSpec(),), (FullAttentionSpec(), MambaSpec()), (UniformSpec(MambaSpec()),)])
def test_a_cache_of_another_kind_is_refused_with_those_that_are_served(specs: tuple[object, ...]) -> None:
    with pytest.raises(Unsupported, match=r"MambaSpec \(layers layer\.0, layer\.1\.\.\.\).*FullAttentionSpec"):
        refuse_unsupported(config(), cache_config(*specs))


def test_a_group_of_supported_layers_is_served() -> None:
    refuse_unsupported(config(), cache_config(UniformSpec(FullAttentionSpec(), FullAttentionSpec())))
