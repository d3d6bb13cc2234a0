"""vLLM's caches as a layout, and the refusal of what cannot be served. vLLM's own specs and views, doubles of the rest."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvbaton.connector import caches as caches_module
from kvbaton.connector.caches import describe_caches, refuse_unsupported
from kvbaton.errors import Unsupported
from kvbaton.geometry.descriptors import describe
from kvbaton.geometry.layout import KVLayout, Part, Region
from kvbaton.geometry.mapping import map_layouts
from kvbaton.transport.base import Span
from kvbaton.types import End

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NUM_BLOCKS, BLOCK, HEADS, HEAD_DIM = 6, 16, 2, 4
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16, sliding_window=40
)
ONE_HEAD = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_DIM, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_DIM, dtype=torch.bfloat16)


@pytest.fixture
def plain_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose kernels keep the tokens of a row apart."""
    monkeypatch.setattr(caches_module, "_packing", lambda *_: "")


def config(
    *,
    isa: str = "vec",
    total_heads: int = HEADS,
    role: str = "kv_both",
    cache_dtype: str = "auto",
    speculative: object = None,
    heads_in_config: dict[str, Any] | None = None,
    overrides: object = None,
    **parallel: int,
) -> VllmConfig:
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    model = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="tiny"),
        hf_text_config=SimpleNamespace(**(heads_in_config or {"num_key_value_heads": total_heads})),
        model_arch_config=SimpleNamespace(per_layer_overrides=overrides),
        use_mla=False,
        get_total_num_hidden_layers=lambda: 2,
        get_total_num_kv_heads=lambda: total_heads,
        get_head_size=lambda: HEAD_DIM,
    )
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        kv_transfer_config=SimpleNamespace(kv_role=role),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer.{number}": SimpleNamespace(isa=isa) for number in range(2)}
        ),
        model_config=model,
    )
    return cast("VllmConfig", made)


def cache_config(*specs: KVCacheSpec, layers: tuple[str, ...] = ("layer.0", "layer.1")) -> KVCacheConfig:
    """One group of these layers per spec; of one spec by default."""
    groups = [KVCacheGroupSpec(list(layers), spec) for spec in specs or (FULL,)]
    made = SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS, kv_cache_layout="LBHNC")
    return cast("KVCacheConfig", made)


def views(
    spec: Any, layout: KVCacheLayout, *, num_layers: int = 2, kernel_block: int | None = None
) -> dict[str, torch.Tensor]:
    """Layers as vLLM places them in one allocation."""
    names = [f"layer.{number}" for number in range(num_layers)]
    page = int(np.prod(compute_layer_kv_cache_shape_bytes(spec, 1)[1:]))
    outer = layout.is_block_outermost
    placed = KVCacheTensor(
        size=page * NUM_BLOCKS * num_layers,
        layers=names,
        layer_stride=page if outer else page * NUM_BLOCKS,
        block_stride=page * num_layers if outer else page,
    )
    if layout in {KVCacheLayout.BHLNC, KVCacheLayout.LHBNC}:  # heads lie outside layers, or outside blocks
        inner = page // spec.num_heads
        placed.layer_stride = inner if outer else page * NUM_BLOCKS
        placed.block_stride = page * num_layers if outer else inner
    raw = torch.zeros(placed.size, dtype=torch.int8)
    return dict(zip(names, create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel_block), strict=True))


def described(caches: dict[str, torch.Tensor], *specs: KVCacheSpec, **changed: Any) -> tuple[KVLayout, list[Span]]:
    layers = tuple(caches)
    layout, spans = describe_caches(
        config(**changed), cache_config(*specs, layers=layers), caches, tp_rank=0, pp_rank=0
    )
    layout.validate()
    return layout, spans


def assert_addresses(region: Region, tensor: torch.Tensor) -> None:
    """The region's arithmetic finds every element that the tensor's own indexing finds."""
    for row in range(region.num_rows):
        for head in range(region.num_heads):
            for token in range(region.row_tokens):
                address = (
                    region.base_address
                    + row * region.row_stride_bytes
                    + head * region.head_stride_bytes
                    + token * region.parts[0].group_stride_bytes
                )
                assert address == tensor[row, head, token].data_ptr()
    assert [part.unit_bytes for part in region.parts] == [tensor[0, 0, 0].nbytes]


@pytest.mark.usefixtures("plain_strides")
@pytest.mark.parametrize("order", KVCacheLayout)
@pytest.mark.parametrize("spec", [FULL, WINDOW, LATENT], ids=["full", "window", "latent"])
def test_every_axis_order_of_vllm_is_described(spec: Any, order: KVCacheLayout) -> None:
    caches = views(spec, order)
    layout, (span,) = described(caches, spec)
    assert [region.layer for region in layout.regions] == ["layer.0", "layer.1"]
    for region in layout.regions:
        assert_addresses(region, caches[region.layer])
        assert span.address <= region.base_address
        assert region.end_address <= span.address + span.num_bytes
    assert (layout.dtype, layout.memory_kind, layout.block_size_tokens) == ("bfloat16", "DRAM", (BLOCK,))
    assert (layout.num_kv_heads, layout.head_dim, layout.model) == (HEADS, HEAD_DIM, "tiny, 2 layers")


@pytest.mark.usefixtures("plain_strides")
@pytest.mark.parametrize("theirs", KVCacheLayout)
@pytest.mark.parametrize("ours", KVCacheLayout)
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
def test_what_one_engine_wrote_another_reads(
    ours: KVCacheLayout, theirs: KVCacheLayout, sizes: tuple[int, int]
) -> None:
    """40 tokens, by indices into vLLM's own views, between engines of any axis orders and block sizes."""
    lists = {16: [3, 5, 1], 32: [4, 2]}
    specs = [dataclasses.replace(FULL, block_size=size) for size in sizes]
    source, destination = (views(spec, order) for spec, order in zip(specs, (ours, theirs), strict=True))
    for cache in source.values():
        cache.view(torch.int16).random_()
    before = {layer: cache.clone() for layer, cache in destination.items()}
    written, _ = described(source, specs[0])
    read_by, _ = described(destination, specs[1])
    found = describe(
        map_layouts(written, read_by, End.SOURCE),
        [lists[sizes[0]]],
        [lists[sizes[1]]],
        first_token=0,
        end_token=40,
        num_tokens=40,
    )
    for read, write, num_bytes in zip(found.our_address, found.their_address, found.length_bytes, strict=True):
        ctypes.memmove(int(write), int(read), int(num_bytes))
    for layer, cache in destination.items():
        expected = before[layer]
        for token in range(48):  # rounded outwards to the smaller row
            expected[lists[sizes[1]][token // sizes[1]], :, token % sizes[1]] = source[layer][
                lists[sizes[0]][token // sizes[0]], :, token % sizes[0]
            ]
        assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


@pytest.mark.usefixtures("plain_strides")
@pytest.mark.parametrize("order", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_kernel_blocks_are_rows(order: KVCacheLayout) -> None:
    """vLLM divides a block of 16 for an attention backend that wants 8."""
    caches = views(FULL, order, kernel_block=8)
    layout, _ = described(caches)
    assert {(region.num_rows, region.row_tokens) for region in layout.regions} == {(2 * NUM_BLOCKS, 8)}
    assert layout.block_size_tokens == (BLOCK,)
    for region in layout.regions:
        assert_addresses(region, caches[region.layer])


@pytest.mark.usefixtures("plain_strides")
def test_an_axis_of_one_needs_no_stride() -> None:
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=HEAD_DIM, dtype=torch.bfloat16)
    cache = torch.zeros(NUM_BLOCKS, 8, dtype=torch.bfloat16).as_strided((NUM_BLOCKS, 1, 1, 8), (8, 0, 0, 1))
    layout, _ = described({"layer.0": cache}, spec, total_heads=1)
    assert_addresses(layout.regions[0], cache)


@pytest.mark.parametrize(("isa", "tokens"), [("vec", 32), ("vec", 64), ("vec16", 16), ("vec16", 48)])
def test_keys_and_values_are_where_vllms_cpu_kernel_puts_them(isa: str, tokens: int) -> None:
    """Found: its keys are transposed within a block, so blocks of another size were cut across and answers were wrong."""
    from vllm import _custom_ops as ops  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    head_dim, block = 64, 1
    cache = torch.zeros(NUM_BLOCKS, HEADS, tokens, 2 * head_dim)
    keys, values = torch.rand(tokens, HEADS, head_dim), torch.rand(tokens, HEADS, head_dim)
    halves = cache.view(NUM_BLOCKS, HEADS, tokens * 2, -1).chunk(2, dim=2)
    slots = torch.arange(tokens) + block * tokens
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

    layout, _ = described({"layer.0": cache}, dataclasses.replace(FULL, block_size=tokens), isa=isa)
    region, memory = layout.regions[0], cache.flatten()
    for head, token in ((0, 0), (1, 5), (0, tokens - 1)):
        start = block * region.row_stride_bytes + head * region.head_stride_bytes
        for part, expected in zip(region.parts, (keys, values), strict=True):
            at = (start + part.offset_bytes + token * part.group_stride_bytes) // 4
            num, step = part.num_units, part.unit_stride_bytes // 4
            found = memory[at : at + num * step : step] if num > 1 else memory[at : at + part.unit_bytes // 4]
            assert torch.equal(found, expected[token, head])


def test_a_kernel_with_rules_of_its_own_needs_heads_in_one_piece() -> None:
    with pytest.raises(Unsupported, match=r"\(cpu vec\) orders a head's tokens by rules of its own.*LBHNC"):
        described(views(FULL, KVCacheLayout.LBNHC))


def test_what_a_kernel_orders_by_rules_we_do_not_know_is_moved_in_whole_blocks() -> None:
    layout, _ = described(views(FULL, KVCacheLayout.LBHNC), isa="amx")
    assert layout.packing == "cpu amx"
    assert {region.parts for region in layout.regions} == {(Part(0, 16, 256, 1, 256, 256),)}


def test_hybrid_groups_keep_their_windows_and_may_lie_on_the_same_bytes() -> None:
    full, window = views(FULL, KVCacheLayout.LBHNC), views(WINDOW, KVCacheLayout.LBHNC)
    shared = full["layer.0"]
    caches = {"a.full": shared, "b.window": shared.view(shared.shape), "c.window": window["layer.1"]}
    groups = [KVCacheGroupSpec(["a.full"], FULL), KVCacheGroupSpec(["b.window", "c.window"], WINDOW)]
    made = SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS, kv_cache_layout=None)
    layout, spans = describe_caches(config(), cast("KVCacheConfig", made), caches, tp_rank=0, pp_rank=0)
    layout.validate()
    assert (layout.window_tokens, layout.axis_order) == ((0, 40), "unnamed")
    assert [(each.layer, each.cache_group) for each in layout.regions] == [
        ("a.full", 0),
        ("b.window", 1),
        ("c.window", 1),
    ]
    assert len(spans) == 2


def test_layers_that_share_one_cache_are_moved_once() -> None:
    cache = views(FULL, KVCacheLayout.LBHNC)["layer.0"]
    layout, _ = described({"layer.1": cache, "layer.0": cache})
    assert [region.layer for region in layout.regions] == ["layer.0"]


def test_tensors_of_layers_in_no_group_are_left_out() -> None:
    caches = views(FULL, KVCacheLayout.LBHNC)
    layout, _ = describe_caches(config(), cache_config(), caches | {"shared": torch.zeros(1)}, tp_rank=0, pp_rank=0)
    assert [region.layer for region in layout.regions] == ["layer.0", "layer.1"]


def test_a_group_of_uniform_type_has_a_spec_per_layer() -> None:
    group = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"layer.0": FULL, "layer.1": ONE_HEAD})
    caches = {
        "layer.0": views(FULL, KVCacheLayout.LBHNC)["layer.0"],
        "layer.1": views(ONE_HEAD, KVCacheLayout.LBHNC)["layer.1"],
    }
    layout, _ = described(caches, group)
    assert [region.total_heads for region in layout.regions] == [2, 1]


def test_a_stage_without_layers_of_a_group_still_counts_the_group() -> None:
    caches = views(FULL, KVCacheLayout.LBHNC)
    groups = [KVCacheGroupSpec([], WINDOW), KVCacheGroupSpec(list(caches), FULL)]
    made = cast("KVCacheConfig", SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS, kv_cache_layout="x"))
    layout, _ = describe_caches(
        config(pipeline_parallel_size=2, role="kv_producer"), made, caches, tp_rank=0, pp_rank=1
    )
    layout.validate()
    assert (layout.window_tokens, layout.pp_size, layout.pp_rank) == ((40, 0), 2, 1)
    assert {region.cache_group for region in layout.regions} == {1}


def test_a_stage_without_any_cache_is_refused() -> None:
    with pytest.raises(Unsupported, match="no layer with a KV cache"):
        describe_caches(config(), cache_config(layers=()), {}, tp_rank=0, pp_rank=0)


@pytest.mark.parametrize(
    ("spec", "tp_size", "changed", "expected"),
    [
        (FULL, 1, {"total_heads": 2}, 2),
        (FULL, 4, {"total_heads": 8}, 8),
        (ONE_HEAD, 4, {"total_heads": 4}, 4),
        (ONE_HEAD, 4, {"total_heads": 2}, 2),  # copies
        (ONE_HEAD, 1, {"total_heads": 1}, 1),
        (LATENT, 4, {"total_heads": 8}, 1),
        # Layers differ: 4 heads in most, 8 in those with a window. One on a rank of 8 is not known to be a copy.
        (
            ONE_HEAD,
            8,
            {"total_heads": 4, "heads_in_config": {"num_key_value_heads": 4, "swa_num_key_value_heads": 8}},
            8,
        ),
        (ONE_HEAD, 8, {"total_heads": 4, "heads_in_config": {"num_kv_heads": [4, 8]}}, 8),
        (ONE_HEAD, 8, {"total_heads": 4, "overrides": [{}]}, 8),
    ],
)
def test_heads_of_a_layer_over_all_ranks(spec: Any, tp_size: int, changed: dict[str, Any], expected: int) -> None:
    layout, _ = described(views(spec, KVCacheLayout.LBHNC), spec, tensor_parallel_size=tp_size, **changed)
    assert {region.total_heads for region in layout.regions} == {expected}


@pytest.mark.parametrize(
    ("cache_dtype", "named"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("fp8_e5m2", r"bfloat16 (fp8_e5m2)")]
)
def test_8_bit_formats_with_the_same_storage_are_told_apart(cache_dtype: str, named: str) -> None:
    layout, _ = described(views(FULL, KVCacheLayout.LBHNC), cache_dtype=cache_dtype)
    assert layout.dtype == named


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, NUM_BLOCKS, 16, 8),
        torch.zeros(NUM_BLOCKS, HEADS, 16),
        torch.zeros(NUM_BLOCKS, HEADS, 8, 16).transpose(2, 3),
        torch.zeros(NUM_BLOCKS + 1, HEADS, 16, 8),
        torch.zeros(NUM_BLOCKS, 3, 16, 8),
        torch.zeros(NUM_BLOCKS, HEADS, 8, 8),
    ],
    ids=["keys and values first", "no heads", "content in pieces", "other blocks", "other heads", "other tokens"],
)
def test_a_tensor_that_is_something_else_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match=r"KV cache of layer\.0 has shape .*Choose another attention backend"):
        described({"layer.0": tensor})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"decode_context_parallel_size": 2}, "decode context parallelism of size 2"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism of size 2"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism of size 2 is supported on prefill engines only"),
        ({"pipeline_parallel_size": 2, "role": "kv_consumer"}, "pipeline parallelism of size 2"),
        ({"speculative": object()}, "speculative decoding"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        refuse_unsupported(config(**changed), cache_config())


def test_stages_are_served_where_the_engine_only_prefills() -> None:
    refuse_unsupported(config(pipeline_parallel_size=4, role="kv_producer"), cache_config())


MAMBA = MambaSpec(block_size=BLOCK, shapes=((2,),), dtypes=(torch.float32,))
UNIFORM = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"layer.0": FULL, "layer.1": MAMBA})


@pytest.mark.parametrize("specs", [(MAMBA,), (FULL, MAMBA), (UNIFORM,)], ids=["alone", "second group", "in a group"])
def test_a_cache_of_another_kind_is_refused_with_those_that_are_served(specs: tuple[Any, ...]) -> None:
    with pytest.raises(Unsupported, match=r"layer\.[01]: a KV cache of kind MambaSpec .*FullAttentionSpec"):
        refuse_unsupported(config(), cache_config(*specs))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (
            SlidingWindowMLASpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.bfloat16, sliding_window=8),
            "kind SlidingWindowMLASpec",
        ),
        (
            MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.bfloat16, tokens_per_state=4),
            "compressed KV cache .4 tokens per stored state",
        ),
        (
            FullAttentionSpec(
                block_size=BLOCK,
                num_kv_heads=4,
                head_size=4,
                dtype=torch.bfloat16,
                num_head_slots=2,
                state_content_bytes=32,
            ),
            "stores 4 KV heads in 2 slots, K and V apart",
        ),
        (
            ChunkedLocalAttentionSpec(
                block_size=BLOCK, num_kv_heads=2, head_size=4, dtype=torch.bfloat16, attention_chunk_size=24
            ),
            "attention chunks of 24 tokens are not whole blocks of 16. Choose a block size that divides 24",
        ),
    ],
)
def test_a_variant_that_cannot_be_described_is_refused_by_name(spec: Any, named: str) -> None:
    with pytest.raises(Unsupported, match=f"layer.0: .*{named}"):
        refuse_unsupported(config(), cache_config(spec))


def test_a_cache_in_host_memory_is_refused() -> None:
    made = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["a", "b", "c", "d"], FULL, host_resident=True)])
    with pytest.raises(Unsupported, match=r"a, b, c\.\.\.: a KV cache in host memory"):
        refuse_unsupported(config(), cast("KVCacheConfig", made))


def test_chunked_local_attention_keeps_a_chunk() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16, attention_chunk_size=32
    )
    layout, _ = described(views(spec, KVCacheLayout.LBHNC), spec)
    assert layout.window_tokens == (32,)


def test_full_attention_with_a_window_keeps_all_tokens() -> None:
    """The hybrid memory manager is off: blocks are kept, the kernel looks at the window only."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16, sliding_window=40
    )
    layout, _ = described(views(spec, KVCacheLayout.LBHNC), spec)
    assert layout.window_tokens == (0,)


def test_different_windows_in_one_group_are_refused() -> None:
    other = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16, sliding_window=80
    )
    group = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"layer.0": WINDOW, "layer.1": other})
    with pytest.raises(Unsupported, match=r"different windows \(\[40, 80\] tokens\)"):
        described(views(WINDOW, KVCacheLayout.LBHNC), group)
