"""vLLM's caches as a layout, and the refusal of what cannot be served. Real tensors, doubles of the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch

from kvbaton.connector import caches as caches_module
from kvbaton.connector.caches import describe_caches, refuse_unsupported
from kvbaton.errors import Unsupported
from kvbaton.geometry.layout import Part, Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NUM_BLOCKS = 6
NUM_HEADS = 2
CONTENT = 8


class FullAttentionSpec:
    block_size = 16


class MLAAttentionSpec:
    block_size = 16


class SlidingWindowSpec:
    block_size = 16
    sliding_window = 100


class MambaSpec:
    block_size = 16


class UniformSpec:
    """A group whose layers differ wraps one spec per layer."""

    block_size = 16

    def __init__(self, *specs: object) -> None:
        self.kv_cache_specs = dict(enumerate(specs))


def config(isa: str = "vec", **changed: Any) -> VllmConfig:
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="tiny"),
        get_total_num_hidden_layers=lambda: 2,
        get_total_num_kv_heads=lambda: NUM_HEADS,
        get_head_size=lambda: 4,
    )
    speculative, role = changed.pop("speculative_config", None), changed.pop("kv_role", "kv_both")
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | changed)),
        speculative_config=speculative,
        model_config=model,
        kv_transfer_config=SimpleNamespace(kv_role=role),
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer.{i}": SimpleNamespace(isa=isa) for i in range(2)}
        ),
    )
    return cast("VllmConfig", made)


def cache_config(*specs: object, layers: tuple[str, ...] = ("layer.0", "layer.1")) -> KVCacheConfig:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers)) for spec in specs or (FullAttentionSpec(),)]
    made = SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS, kv_cache_layout="LBNHC")
    return cast("KVCacheConfig", made)


def tensors(*, heads: int = NUM_HEADS, tokens: int = 16, blocks: int = NUM_BLOCKS) -> dict[str, torch.Tensor]:
    """As vLLM hands them over: [blocks, heads, tokens, content], here head-major and dense."""
    return {f"layer.{i}": torch.zeros(blocks, heads, tokens, CONTENT, dtype=torch.bfloat16) for i in (1, 0)}


def test_a_layer_is_a_region_and_an_allocation_a_span() -> None:
    caches = tensors()
    layout, spans = describe_caches(config(), cache_config(), caches, tp_rank=0)
    layout.validate()
    assert [region.layer for region in layout.regions] == ["layer.0", "layer.1"]
    assert [region.base_address for region in layout.regions] == [caches[f"layer.{i}"].data_ptr() for i in (0, 1)]
    assert layout.regions[0] == Region(
        layer="layer.0",
        cache_group=0,
        base_address=caches["layer.0"].data_ptr(),
        num_rows=NUM_BLOCKS,
        row_stride_bytes=512,
        row_tokens=16,
        num_heads=2,
        total_heads=2,
        head_stride_bytes=256,
        parts=(Part(0, 1, 2, 4, 32, 2), Part(128, 1, 8, 1, 8, 8)),
    )
    assert (layout.dtype, layout.memory_kind, layout.block_size_tokens) == ("bfloat16", "DRAM", (16,))
    assert layout.window_tokens == (0,)
    assert {span.address for span in spans} == {each.data_ptr() for each in caches.values()}
    assert {span.num_bytes for span in spans} == {NUM_BLOCKS * 512}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_in_every_axis_order_the_layout_finds_what_the_tensor_holds(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches_module, "_packing", lambda *_: "")  # as on a device whose kernels use plain strides
    sizes = {"L": 2, "B": NUM_BLOCKS, "H": NUM_HEADS, "N": 16, "C": CONTENT}
    memory = torch.arange(2 * NUM_BLOCKS * NUM_HEADS * 16 * CONTENT, dtype=torch.int32)
    whole = memory.view([sizes[axis] for axis in order]).permute([order.index(axis) for axis in "LBHNC"])
    caches = {f"layer.{i}": whole[i] for i in (0, 1)}
    layout, (span,) = describe_caches(config(), cache_config(), caches, tp_rank=0)
    layout.validate()
    for index, region in enumerate(layout.regions):
        for block, head, token in ((0, 0, 0), (3, 1, 7), (5, 0, 15)):
            address = region.base_address + block * region.row_stride_bytes
            address += head * region.head_stride_bytes + token * region.parts[0].group_stride_bytes
            assert memory[(address - memory.data_ptr()) // 4] == whole[index, block, head, token, 0]
        assert span.address <= region.base_address
        assert region.end_address <= span.address + span.num_bytes


@pytest.mark.parametrize(("isa", "tokens"), [("vec", 32), ("vec", 64), ("vec16", 16), ("vec16", 48)])
def test_keys_and_values_are_where_vllms_cpu_kernel_puts_them(isa: str, tokens: int) -> None:
    """Found: its keys are transposed within a block, so blocks of another size were cut across and answers were wrong."""
    from vllm import _custom_ops as ops  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    head_dim, block = 64, 1
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, tokens, 2 * head_dim)
    keys, values = torch.rand(tokens, NUM_HEADS, head_dim), torch.rand(tokens, NUM_HEADS, head_dim)
    halves = cache.view(NUM_BLOCKS, NUM_HEADS, tokens * 2, -1).chunk(2, dim=2)
    slots = torch.arange(tokens) + block * tokens
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

    spec = FullAttentionSpec()
    spec.block_size = tokens
    layout, _ = describe_caches(config(isa), cache_config(spec), {"layer.0": cache}, tp_rank=0)
    layout.validate()
    region, memory = layout.regions[0], cache.flatten()
    for head, token in ((0, 0), (1, 5), (0, tokens - 1)):
        start = block * region.row_stride_bytes + head * region.head_stride_bytes
        for part, expected in zip(region.parts, (keys, values), strict=True):
            at = (start + part.offset_bytes + token * part.group_stride_bytes) // 4
            num, step = part.num_units, part.unit_stride_bytes // 4
            found = memory[at : at + num * step : step] if num > 1 else memory[at : at + part.unit_bytes // 4]
            assert torch.equal(found, expected[token, head])


def test_what_a_kernel_orders_by_rules_we_do_not_know_is_moved_in_whole_blocks() -> None:
    layout, _ = describe_caches(config("amx"), cache_config(), tensors(), tp_rank=0)
    layout.validate()
    assert layout.packing == "cpu amx"
    assert {region.parts for region in layout.regions} == {(Part(0, 16, 256, 1, 256, 256),)}


def test_a_block_of_several_kernel_blocks_is_several_rows() -> None:
    caches = tensors(tokens=4, blocks=NUM_BLOCKS * 4)
    layout, _ = describe_caches(config(), cache_config(), caches, tp_rank=0)
    assert {(region.num_rows, region.row_tokens) for region in layout.regions} == {(NUM_BLOCKS * 4, 4)}


@pytest.mark.parametrize(
    ("tp_size", "heads_on_rank", "spec", "total"),
    [
        (1, 2, FullAttentionSpec(), 2),
        (2, 1, FullAttentionSpec(), 2),
        (4, 1, FullAttentionSpec(), 2),
        (4, 1, MLAAttentionSpec(), 1),
        (2, 4, FullAttentionSpec(), 8),
    ],
    ids=["alone", "shared", "replicated", "latent", "a layer with more heads than the model says"],
)
def test_the_heads_of_all_ranks_are_known(tp_size: int, heads_on_rank: int, spec: object, total: int) -> None:
    caches = tensors(heads=heads_on_rank)
    layout, _ = describe_caches(config(tensor_parallel_size=tp_size), cache_config(spec), caches, tp_rank=tp_size - 1)
    layout.validate()
    assert {region.total_heads for region in layout.regions} == {total}


def test_one_head_on_each_of_several_ranks_of_a_model_with_more_is_refused() -> None:
    made = config(tensor_parallel_size=2)
    cast("Any", made.model_config).get_total_num_kv_heads = lambda: 4
    with pytest.raises(Unsupported, match=r"layer\.. has 1 KV head on each of 2 ranks while the model has 4"):
        describe_caches(made, cache_config(), tensors(heads=1), tp_rank=0)


def test_a_sliding_window_is_a_window_and_a_mixed_group_has_none() -> None:
    layout, _ = describe_caches(config(), cache_config(SlidingWindowSpec()), tensors(), tp_rank=0)
    assert layout.window_tokens == (100,)
    mixed = cache_config(UniformSpec(SlidingWindowSpec(), FullAttentionSpec()))
    assert describe_caches(config(), mixed, tensors(), tp_rank=0)[0].window_tokens == (0,)


def test_stages_and_ranks_are_told() -> None:
    made = config(pipeline_parallel_size=2, tensor_parallel_size=2, kv_role="kv_producer")
    layout, _ = describe_caches(made, cache_config(), tensors(heads=1), tp_rank=1, pp_rank=1)
    assert (layout.tp_size, layout.tp_rank, layout.pp_size, layout.pp_rank) == (2, 1, 2, 1)


def test_tensors_of_layers_in_no_group_are_left_out() -> None:
    caches = tensors() | {"cross": torch.zeros(1)}
    layout, _ = describe_caches(config(), cache_config(), caches, tp_rank=0)
    assert [region.layer for region in layout.regions] == ["layer.0", "layer.1"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, NUM_BLOCKS, 16, 2, 8),
        torch.zeros(NUM_BLOCKS, 2, 16, 8).transpose(2, 3),
        torch.zeros(NUM_BLOCKS + 1, 2, 16, 8),
        torch.zeros(NUM_BLOCKS, 2, 12, 8),
    ],
    ids=["keys and values first", "content in pieces", "more blocks than configured", "blocks of another size"],
)
def test_what_is_not_blocks_heads_tokens_content_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match=r"layer\.0.*Choose another attention backend"):
        describe_caches(config(), cache_config(layers=("layer.0",)), {"layer.0": tensor}, tp_rank=0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism of size 2 is supported on prefill engines only"),
        ({"pipeline_parallel_size": 2, "kv_role": "kv_consumer"}, "pipeline parallelism of size 2"),
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
