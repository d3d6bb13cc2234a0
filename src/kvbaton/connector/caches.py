"""vLLM's cache configuration and tensors -> KVLayout, and the refusal of what cannot be served.

Invariant: everything unsupported is refused here, once, at start, by name and with the remedy. Next: facade.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbaton.errors import Unsupported
from kvbaton.geometry.layout import KVLayout, Region
from kvbaton.transport.base import Span

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SUPPORTED_SPECS = {"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "ChunkedLocalAttentionSpec"}


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises Unsupported naming the feature and what to change."""
    parallel = vllm_config.parallel_config
    sizes = {
        "pipeline parallelism": parallel.pipeline_parallel_size,
        "decode context parallelism": parallel.decode_context_parallel_size,
        "prefill context parallelism": parallel.prefill_context_parallel_size,
    }
    for feature, size in sizes.items():
        if size > 1:
            raise Unsupported(f"{feature} of size {size} is not supported yet. Start the engine with size 1.")
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
) -> tuple[KVLayout, list[Span]]:
    """This rank's layout, and the memory to register with the transport. Raises Unsupported."""
    refuse_unsupported(vllm_config, kv_cache_config)
    group_of_layer = {
        layer: index for index, group in enumerate(kv_cache_config.kv_cache_groups) for layer in group.layer_names
    }
    tensors = {layer: tensor for layer, tensor in kv_caches.items() if layer in group_of_layer}
    regions = [
        _region(layer, group_of_layer[layer], tensor, kv_cache_config.num_blocks) for layer, tensor in tensors.items()
    ]
    device = next(iter(tensors.values())).device
    model = vllm_config.model_config
    layout = KVLayout(
        regions=tuple(sorted(regions, key=lambda region: region.layer)),
        block_size_tokens=tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups),
        memory_kind="DRAM" if device.type == "cpu" else "VRAM",
        device_id=device.index or 0,
        model=f"{model.hf_config.model_type}, {model.get_total_num_hidden_layers()} layers",
        dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_dim=model.get_head_size(),
        axis_order=str(kv_cache_config.kv_cache_layout or "unnamed"),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=vllm_config.parallel_config.pipeline_parallel_size,
    )
    return layout, _spans(tensors)


def _region(layer: str, group: int, tensor: torch.Tensor, num_blocks: int) -> Region:
    """A layer's blocks along the tensor's first axis. Raises Unsupported when they do not lie there in one piece each."""
    stride_bytes = tensor.stride(0) * tensor.element_size()
    block = tensor[0]
    if tensor.shape[0] != num_blocks or not block.is_contiguous():
        raise Unsupported(
            f"the KV cache of {layer} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}; each of its "
            f"{num_blocks} blocks must be contiguous along the first axis. Choose another attention backend."
        )
    return Region(
        layer=layer,
        cache_group=group,
        base_address=tensor.data_ptr(),
        block_stride_bytes=stride_bytes,
        block_bytes=block.numel() * block.element_size(),
        num_blocks=num_blocks,
    )


def _spans(tensors: Mapping[str, torch.Tensor]) -> list[Span]:
    """Each backing allocation once: layers may share one."""
    spans = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        spans[storage.data_ptr()] = Span(storage.data_ptr(), storage.nbytes(), tensor.device.index or 0)
    return list(spans.values())
