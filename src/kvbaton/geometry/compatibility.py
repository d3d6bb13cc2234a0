"""What two layouts must share before bytes can move between them. Every refusal names the property and both values."""

from __future__ import annotations

from kvbaton.errors import Incompatible
from kvbaton.geometry.layout import KVLayout, Region
from kvbaton.types import End

NUM_SHOWN = 4


def require_compatible(ours: KVLayout, theirs: KVLayout, our_end: End) -> None:
    """KV can be moved between the two. Raises Incompatible naming the first property in the way, causes before effects."""
    properties = [
        ("model", ours.model, theirs.model),
        ("KV cache dtype", ours.dtype, theirs.dtype),
        ("kind of memory", ours.memory_kind, theirs.memory_kind),
        ("number of KV heads", ours.num_kv_heads, theirs.num_kv_heads),
        ("head dimension", ours.head_dim, theirs.head_dim),
    ]
    for name, mine, other in properties:
        _require_equal(name, mine, other)
    source, destination = (ours, theirs) if our_end is End.SOURCE else (theirs, ours)
    if destination.pp_size > 1:
        raise Incompatible(
            f"the decode engine has pipeline-parallel size {destination.pp_size} and the prefill engine "
            f"{source.pp_size}; only a prefill engine may have stages. Start the decode engine with size 1."
        )
    _require_layers(ours, theirs, source, destination)
    _require_windows(ours, theirs, source)


def _require_equal(name: str, mine: object, other: object) -> None:
    if mine != other:
        raise Incompatible(
            f"{name} differs: {mine} on this engine, {other} on the peer. Start both engines with the same {name}."
        )


def _require_layers(ours: KVLayout, theirs: KVLayout, source: KVLayout, destination: KVLayout) -> None:
    """Both have the same layers, or the source is one of several stages and has some of them; each of the same content."""
    mine, other = _by_layer(ours), _by_layer(theirs)
    offered, wanted = _by_layer(source).keys(), _by_layer(destination).keys()
    if offered - wanted or (wanted - offered and source.pp_size == 1):
        only_here, only_there = sorted(mine.keys() - other.keys()), sorted(other.keys() - mine.keys())
        _require_equal("set of layers", only_here[:NUM_SHOWN], only_there[:NUM_SHOWN])
    for layer in sorted(offered):
        _require_equal(f"number of KV heads of {layer}", mine[layer].total_heads, other[layer].total_heads)
        _require_equal(f"bytes per head and token of {layer}", mine[layer].content_bytes, other[layer].content_bytes)


def _require_windows(ours: KVLayout, theirs: KVLayout, source: KVLayout) -> None:
    """What the destination needs, the source keeps: all tokens, or the same window."""
    mine, other = _by_layer(ours), _by_layer(theirs)
    for region in source.regions:
        if source.window_tokens[region.cache_group]:
            _require_equal(
                f"sliding window of {region.layer}",
                ours.window_tokens[mine[region.layer].cache_group],
                theirs.window_tokens[other[region.layer].cache_group],
            )


def _by_layer(layout: KVLayout) -> dict[str, Region]:
    return {region.layer: region for region in layout.regions}
