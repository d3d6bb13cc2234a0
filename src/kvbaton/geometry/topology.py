"""Who feeds whom: which prefill ranks a decode rank gets its KV from, and which heads from each.

Invariant: every head of every decode rank comes from exactly one prefill rank of each pipeline stage. A world rank is
`pp_rank * tp_size + tp_rank`; decode engines have one pipeline stage. Next: mapping.py.
"""

from __future__ import annotations

from kvbaton.errors import Incompatible
from kvbaton.geometry.heads import num_copies, owned_heads
from kvbaton.geometry.layout import MAX_RANKS, KVLayout


def heads_between(
    total_heads: int, prefill_tp_size: int, prefill_tp_rank: int, decode_tp_size: int, decode_tp_rank: int
) -> range:
    """The heads, numbered over the whole layer, that the decode rank takes from the prefill rank; empty if none.

    Of several prefill ranks with the same head, decode rank `j` takes the `j mod copies`-th.
    Raises Incompatible when the heads cannot be divided over either size.
    """
    offered = owned_heads(total_heads, prefill_tp_size, prefill_tp_rank)
    wanted = owned_heads(total_heads, decode_tp_size, decode_tp_rank)
    copies = num_copies(total_heads, prefill_tp_size)
    if prefill_tp_rank % copies != decode_tp_rank % copies:
        return range(0)
    first, end = max(offered.start, wanted.start), min(offered.stop, wanted.stop)
    return range(first, end) if first < end else range(0)


def producers_of(layout: KVLayout, prefill_tp_size: int, prefill_pp_size: int) -> tuple[int, ...]:
    """World ranks of the prefill engine that feed the decode rank with this layout, ascending.

    Raises Incompatible when heads cannot be divided over the prefill ranks, or the sizes are out of bounds.
    """
    _require_sane(prefill_tp_size, prefill_pp_size)
    tp_ranks = _feeding(layout, prefill_tp_size, layout.tp_rank)
    return _in_every_stage(tp_ranks, prefill_tp_size, prefill_pp_size)


def num_readers(layout: KVLayout, prefill_tp_size: int, prefill_pp_size: int, prefill_rank: int) -> int:
    """How many ranks of the decode engine, of which `layout` is one rank's, the prefill world rank feeds."""
    _require_sane(prefill_tp_size, prefill_pp_size)
    tp_rank = prefill_rank % prefill_tp_size
    return sum(tp_rank in _feeding(layout, prefill_tp_size, decode_tp_rank) for decode_tp_rank in range(layout.tp_size))


def unread_by_all(layout: KVLayout, prefill_tp_size: int, prefill_pp_size: int) -> tuple[int, ...]:
    """World ranks of the prefill engine that feed no rank of the decode engine, ascending."""
    _require_sane(prefill_tp_size, prefill_pp_size)
    read = {
        tp_rank
        for decode_tp_rank in range(layout.tp_size)
        for tp_rank in _feeding(layout, prefill_tp_size, decode_tp_rank)
    }
    return _in_every_stage(set(range(prefill_tp_size)) - read, prefill_tp_size, prefill_pp_size)


def _require_sane(prefill_tp_size: int, prefill_pp_size: int) -> None:
    if min(prefill_tp_size, prefill_pp_size) < 1 or prefill_tp_size * prefill_pp_size > MAX_RANKS:
        raise Incompatible(
            f"the prefill engine says it has tensor-parallel size {prefill_tp_size} and pipeline-parallel size "
            f"{prefill_pp_size}; this release takes 1 to {MAX_RANKS} ranks."
        )


def _feeding(layout: KVLayout, prefill_tp_size: int, decode_tp_rank: int) -> set[int]:
    """Tensor-parallel ranks that feed the decode rank in at least one layer."""
    found: set[int] = set()
    for total_heads in {region.total_heads for region in layout.regions}:
        copies = num_copies(total_heads, prefill_tp_size)
        heads_per_rank = len(owned_heads(total_heads, prefill_tp_size, 0))
        for head in owned_heads(total_heads, layout.tp_size, decode_tp_rank):
            found.add(head // heads_per_rank * copies + decode_tp_rank % copies)
    return found


def _in_every_stage(tp_ranks: set[int], tp_size: int, pp_size: int) -> tuple[int, ...]:
    return tuple(stage * tp_size + tp_rank for stage in range(pp_size) for tp_rank in sorted(tp_ranks))
