"""vLLM's cache configuration and tensors -> KVLayout, and the refusal of what cannot be served.

Invariant: everything unsupported is refused here, once, at start, by name and with the remedy. Next: facade.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbaton.errors import Unsupported
from kvbaton.geometry.layout import KVLayout, Part, Region, plain
from kvbaton.transport.base import Span

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
        for spec in _layer_specs(group.kv_cache_spec):
            if type(spec).__name__ not in _SUPPORTED_SPECS:
                raise Unsupported(
                    f"KV cache of kind {type(spec).__name__} (layers {', '.join(group.layer_names[:3])}...) is not "
                    f"supported yet. Supported kinds: {', '.join(sorted(_SUPPORTED_SPECS))}."
                )


def _layer_specs(spec: object) -> list[object]:
    """A group of uniform type wraps one spec per layer; any other group is its own spec."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


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
    groups = kv_cache_config.kv_cache_groups
    group_of_layer = {layer: index for index, group in enumerate(groups) for layer in group.layer_names}
    tensors = {layer: tensor for layer, tensor in kv_caches.items() if layer in group_of_layer}
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    block_sizes = tuple(group.kv_cache_spec.block_size for group in groups)
    packings = {layer: _packing(vllm_config, layer, tensor) for layer, tensor in tensors.items()}
    regions = []
    for layer, tensor in tensors.items():
        index = group_of_layer[layer]
        rows_per_block = _rows_per_block(layer, tensor, block_sizes[index], kv_cache_config.num_blocks)
        heads = _total_heads(groups[index].kv_cache_spec, layer, tensor, model.get_total_num_kv_heads(), parallel)
        regions.append(_region(layer, index, tensor, block_sizes[index] // rows_per_block, heads, packings[layer]))
    device = next(iter(tensors.values())).device
    layout = KVLayout(
        regions=tuple(sorted(regions, key=lambda region: region.layer)),
        block_size_tokens=block_sizes,
        window_tokens=tuple(_window_tokens(group.kv_cache_spec) for group in groups),
        memory_kind="DRAM" if device.type == "cpu" else "VRAM",
        device_id=device.index or 0,
        model=f"{model.hf_config.model_type}, {model.get_total_num_hidden_layers()} layers",
        dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        axis_order=str(kv_cache_config.kv_cache_layout or "unnamed"),
        packing=", ".join(sorted(set(packings.values()))),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
    )
    return layout, _spans(tensors)


def _rows_per_block(layer: str, tensor: torch.Tensor, block_size_tokens: int, num_blocks: int) -> int:
    """Kernel blocks per block. Raises Unsupported when the tensor is not vLLM's [blocks, heads, tokens, content]."""
    if tensor.dim() == _NUM_AXES and tensor.stride(-1) == 1 and tensor.shape[0] % num_blocks == 0:
        rows_per_block = int(tensor.shape[0]) // num_blocks
        if tensor.shape[2] * rows_per_block == block_size_tokens:
            return rows_per_block
    raise Unsupported(
        f"the KV cache of {layer} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}; expected "
        f"[{num_blocks} blocks, heads, {block_size_tokens} tokens, content] or a whole number of kernel blocks for each "
        "block. Choose another attention backend or block size."
    )


def _total_heads(spec: object, layer: str, tensor: torch.Tensor, of_model: int, parallel: ParallelConfig) -> int:
    """KV heads of the layer over all tensor-parallel ranks: those of the model, unless the layer has others."""
    names = {type(each).__name__ for each in _layer_specs(spec)}
    on_rank, tp_size = int(tensor.shape[1]), int(parallel.tensor_parallel_size)
    if names <= _LATENT_SPECS:
        return 1
    if on_rank == max(1, of_model // tp_size):
        return of_model
    if on_rank == 1 and tp_size > 1:
        raise Unsupported(
            f"layer {layer} has 1 KV head on each of {tp_size} ranks while the model has {of_model}; whether they are "
            "copies of one is not known. Start the engine with tensor-parallel size 1."
        )
    return on_rank * tp_size


def _window_tokens(spec: object) -> int:
    """How many of the last tokens the group's layers look at; 0 for all."""
    windows = [getattr(each, "sliding_window", None) for each in _layer_specs(spec)]
    return max((int(window) for window in windows if window), default=0) if all(windows) else 0


def _region(layer: str, group: int, tensor: torch.Tensor, row_tokens: int, total_heads: int, packing: str) -> Region:
    size_bytes = tensor.element_size()
    row_stride, head_stride, token_stride, _ = (stride * size_bytes for stride in tensor.stride())
    content_bytes = int(tensor.shape[3]) * size_bytes
    return Region(
        layer=layer,
        cache_group=group,
        base_address=tensor.data_ptr(),
        num_rows=int(tensor.shape[0]),
        row_stride_bytes=row_stride,
        row_tokens=row_tokens,
        num_heads=int(tensor.shape[1]),
        total_heads=total_heads,
        # The stride of an axis of one is whatever torch made of it.
        head_stride_bytes=head_stride if tensor.shape[1] > 1 else max(head_stride, content_bytes),
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
