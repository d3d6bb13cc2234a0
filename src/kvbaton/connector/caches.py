"""vLLM's cache configuration and tensors -> KVLayout, and the refusal of what cannot be served.

Invariant: everything unsupported is refused here, once, at start, by name and with the remedy. Next: facade.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvbaton.errors import Unsupported
from kvbaton.geometry.layout import KVLayout, Part, Region, plain
from kvbaton.transport.base import Span

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_NUM_AXES = 4
_TRANSPOSED_KEYS = {"cpu vec", "cpu vec16"}
_LATENT_SPECS = {"MLAAttentionSpec"}
_SUPPORTED_SPECS = {"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "ChunkedLocalAttentionSpec"}


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises Unsupported naming the feature and what to change."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    sizes = {
        "decode context parallelism": parallel.decode_context_parallel_size,
        "prefill context parallelism": parallel.prefill_context_parallel_size,
    }
    for feature, size in sizes.items():
        if size > 1:
            raise Unsupported(f"{feature} of size {size} is not supported yet. Start the engine with size 1.")
    if parallel.pipeline_parallel_size > 1 and (transfer is None or transfer.kv_role != "kv_producer"):
        raise Unsupported(
            f"pipeline parallelism of size {parallel.pipeline_parallel_size} is supported on prefill engines only. Set "
            "kv_role to kv_producer, or start the engine with size 1."
        )
    if vllm_config.speculative_config is not None:
        raise Unsupported("speculative decoding is not supported yet. Start the engine without --speculative-config.")
    for group in kv_cache_config.kv_cache_groups:
        if group.host_resident:
            raise Unsupported(f"{_some(group.layer_names)}: a KV cache in host memory (HiSparse) is not supported yet.")
        for layer, spec in _layer_specs(group):
            _refuse_spec(layer, spec)


def _refuse_spec(layer: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in _SUPPORTED_SPECS:
        raise Unsupported(
            f"{layer}: a KV cache of kind {kind} is not supported yet. Supported kinds: "
            f"{', '.join(sorted(_SUPPORTED_SPECS))}."
        )
    if spec.tokens_per_state != 1:
        raise Unsupported(
            f"{layer}: a compressed KV cache ({spec.tokens_per_state} tokens per stored state) is not supported yet."
        )
    if spec.num_heads != spec.num_kv_heads:
        raise Unsupported(
            f"{layer}: this attention backend stores {spec.num_kv_heads} KV heads in {spec.num_heads} slots, K and V "
            "apart. Choose another attention backend or KV cache dtype."
        )
    if kind == "ChunkedLocalAttentionSpec" and spec.attention_chunk_size % spec.block_size:
        raise Unsupported(
            f"{layer}: attention chunks of {spec.attention_chunk_size} tokens are not whole blocks of {spec.block_size}. "
            f"Choose a block size that divides {spec.attention_chunk_size}."
        )


def _layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, Any]]:
    """A group of uniform type wraps one spec per layer; any other group's spec is that of all its layers."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for layer in group.layer_names:
        yield layer, inner[layer] if isinstance(inner, dict) else group.kv_cache_spec


def _some(layers: list[str]) -> str:
    return ", ".join(layers[:3]) + ("..." if len(layers) > 3 else "")


def describe_caches(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    tp_rank: int,
    pp_rank: int = 0,
) -> tuple[KVLayout, list[Span]]:
    """This rank's layout, and the memory to register with the transport. Raises Unsupported."""
    refuse_unsupported(vllm_config, kv_cache_config)
    groups, model, parallel = kv_cache_config.kv_cache_groups, vllm_config.model_config, vllm_config.parallel_config
    tensors: dict[str, torch.Tensor] = {}
    packings: dict[str, str] = {}
    regions: list[Region] = []
    for index, group in enumerate(groups):
        for layer, spec in _layer_specs(group):
            tensors[layer] = tensor = kv_caches[layer]
            packings[layer] = _packing(vllm_config, layer, tensor)
            row_tokens = _row_tokens(layer, tensor, spec, kv_cache_config.num_blocks)
            total_heads = _total_heads(vllm_config, spec)
            regions.append(_region(layer, index, tensor, row_tokens, total_heads, packings[layer]))
    if not tensors:
        raise Unsupported("this rank has no layer with a KV cache. Start the engine with fewer pipeline stages.")
    device = next(iter(tensors.values())).device
    layout = KVLayout(
        regions=tuple(_without_aliases(sorted(regions, key=lambda region: region.layer))),
        block_size_tokens=tuple(group.kv_cache_spec.block_size for group in groups),
        window_tokens=tuple(_window_tokens(group) for group in groups),
        memory_kind="DRAM" if device.type == "cpu" else "VRAM",
        device_id=device.index or 0,
        model=f"{model.hf_config.model_type}, {model.get_total_num_hidden_layers()} layers",
        dtype=_dtype(vllm_config, tensors),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        axis_order=str(kv_cache_config.kv_cache_layout or "unnamed"),
        packing=", ".join(sorted(set(packings.values()))),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
    )
    return layout, _spans(tensors)


def _row_tokens(layer: str, tensor: torch.Tensor, spec: Any, num_blocks: int) -> int:
    """Tokens of one kernel block: vLLM may divide a block into several for its attention backend.

    Raises Unsupported when the tensor is not vLLM's [blocks, heads, tokens, content].
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) == _NUM_AXES and shape[1] == spec.num_kv_heads and strides[3] == 1 and shape[0] % num_blocks == 0:
        row_tokens = int(shape[2])
        if row_tokens * (shape[0] // num_blocks) == spec.block_size:
            return row_tokens
    raise Unsupported(
        f"the KV cache of {layer} has shape {shape} and strides {strides}; expected [{num_blocks} blocks, "
        f"{spec.num_kv_heads} heads, {spec.block_size} tokens, content] or a whole number of kernel blocks for each "
        "block. Choose another attention backend or block size."
    )


def _total_heads(vllm_config: VllmConfig, spec: Any) -> int:
    """KV heads of a layer over all ranks.

    A rank's only head may be one of as many as there are ranks, or a copy; vLLM does not say which for a layer, only for
    the model. Where layers differ it is taken for the former: true between engines of equal size, and a peer of another
    size counts otherwise and is refused.
    """
    model, tp_size = vllm_config.model_config, int(vllm_config.parallel_config.tensor_parallel_size)
    if type(spec).__name__ in _LATENT_SPECS:
        return 1
    if spec.num_kv_heads == 1 and not _has_varying_heads(model):
        return min(tp_size, int(model.get_total_num_kv_heads()))
    return int(spec.num_kv_heads) * tp_size


def _has_varying_heads(model: ModelConfig) -> bool:
    """Layers of this model may differ in their number of KV heads."""
    counts = [
        value
        for name, value in vars(model.hf_text_config).items()
        if value is not None and ("kv_head" in name or "key_value_head" in name)
    ]
    is_listed = any(not isinstance(count, int) for count in counts)
    return is_listed or len(set(counts)) > 1 or model.model_arch_config.per_layer_overrides is not None


def _without_aliases(regions: list[Region]) -> Iterator[Region]:
    """Layers that share one cache (cross-layer KV sharing) are moved once, under the first name.

    Regions of different groups may lie on the same bytes and stay: a block belongs to one group at a time.
    """
    seen = set()
    for region in regions:
        place = (region.cache_group, region.base_address)
        if place not in seen:
            seen.add(place)
            yield region


def windowed_groups(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The groups that do not keep all blocks of a request. Raises Unsupported."""
    return tuple(index for index, group in enumerate(kv_cache_config.kv_cache_groups) if _window_tokens(group))


def _window_tokens(group: KVCacheGroupSpec) -> int:
    """How many of the last tokens the group still has blocks for; 0 when it keeps all. Raises Unsupported."""
    windows = {_spec_window(spec) for _, spec in _layer_specs(group)} or {_spec_window(group.kv_cache_spec)}
    if len(windows) > 1:
        raise Unsupported(
            f"{_some(group.layer_names)}: layers of one cache group with different windows ({sorted(windows)} tokens) are "
            "not supported yet."
        )
    return windows.pop()


def _spec_window(spec: Any) -> int:
    """Full attention may have a window too (the hybrid memory manager is off): its blocks are all kept, and cached."""
    kind = type(spec).__name__
    if kind == "SlidingWindowSpec":
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if kind == "ChunkedLocalAttentionSpec" else 0


def _dtype(vllm_config: VllmConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """What the bytes mean. Several 8-bit formats are stored as the same tensor type; --kv-cache-dtype tells them apart."""
    stored = "+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
    named = vllm_config.cache_config.cache_dtype
    return stored if named in {"auto", stored} else f"{stored} ({named})"


def _region(layer: str, group: int, tensor: torch.Tensor, row_tokens: int, total_heads: int, packing: str) -> Region:
    size_bytes = tensor.element_size()
    content_bytes = int(tensor.shape[3]) * size_bytes
    row_stride, head_stride, token_stride = (
        # The stride of an axis of one is whatever torch made of it.
        int(stride) * size_bytes if size > 1 else content_bytes
        for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    )
    if packing and token_stride != content_bytes:
        raise Unsupported(
            f"the KV cache of {layer} has strides {tuple(tensor.stride())}, and its attention kernel ({packing}) orders a "
            "head's tokens by rules of its own; they must lie in one piece. Choose another KV cache layout (LBHNC)."
        )
    return Region(
        layer=layer,
        cache_group=group,
        base_address=tensor.data_ptr(),
        num_rows=int(tensor.shape[0]),
        row_stride_bytes=row_stride,
        row_tokens=row_tokens,
        num_heads=int(tensor.shape[1]),
        total_heads=total_heads,
        head_stride_bytes=head_stride,
        parts=_parts(packing, row_tokens, token_stride, content_bytes, size_bytes),
    )


def _parts(
    packing: str, row_tokens: int, token_stride_bytes: int, content_bytes: int, size_bytes: int
) -> tuple[Part, ...]:
    """Where one head of one row has its tokens."""
    if not packing:
        return plain(token_stride_bytes, content_bytes)
    half_bytes = content_bytes // 2
    if packing in _TRANSPOSED_KEYS:
        # Keys as [head dimension, tokens], then values as [tokens, head dimension] (tests/unit/connector checks it).
        keys = Part(0, 1, size_bytes, half_bytes // size_bytes, row_tokens * size_bytes, size_bytes)
        values = Part(row_tokens * half_bytes, 1, half_bytes, 1, half_bytes, half_bytes)
        return keys, values
    whole_bytes = row_tokens * content_bytes
    return (Part(0, row_tokens, whole_bytes, 1, whole_bytes, whole_bytes),)


def _packing(vllm_config: VllmConfig, layer: str, tensor: torch.Tensor) -> str:
    """How the attention kernel orders a head's row inside: vLLM's CPU kernels do it by instruction set."""
    if tensor.device.type != "cpu":
        return ""
    attention = vllm_config.compilation_config.static_forward_context.get(layer)
    return f"cpu {getattr(attention, 'isa', 'unknown')}"


def _spans(tensors: Mapping[str, torch.Tensor]) -> list[Span]:
    """Each backing allocation once: layers may share one."""
    spans = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        spans[storage.data_ptr()] = Span(storage.data_ptr(), storage.nbytes(), tensor.device.index or 0)
    return list(spans.values())
