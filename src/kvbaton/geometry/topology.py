"""Which ranks feed which: heads and pipeline stages, as arithmetic on sizes. Every decode rank works it out for itself.

Invariant: every head that a decode rank owns comes from exactly one prefill rank of every stage. Of several prefill ranks
that hold the same head, decode rank `j` takes the `(j mod copies)`-th, so that the load is spread. Next: mapping.py.
"""

from __future__ import annotations

from kvbaton.errors import Incompatible
from kvbaton.geometry.heads import num_copies, owned_heads
from kvbaton.geometry.layout import MAX_RANKS, KVLayout


def heads_between(
    total_heads: int, prefill_tp_size: int, prefill_tp_rank: int, decode_tp_size: int, decode_tp_rank: int
) -> range:
    """The heads that this decode rank takes from this prefill rank; none where it takes a copy elsewhere."""
    held = owned_heads(total_heads, prefill_tp_size, prefill_tp_rank)
    wanted = owned_heads(total_heads, decode_tp_size, decode_tp_rank)
    copies = num_copies(total_heads, prefill_tp_size)
    if prefill_tp_rank % copies != decode_tp_rank % copies:
        return range(0)
    return range(max(held.start, wanted.start), min(held.stop, wanted.stop))


def _feeds(
    totals: set[int], prefill_tp_size: int, prefill_tp_rank: int, decode_tp_size: int, decode_tp_rank: int
) -> bool:
    return any(
        len(heads_between(total, prefill_tp_size, prefill_tp_rank, decode_tp_size, decode_tp_rank)) for total in totals
    )


def _totals(layout: KVLayout) -> set[int]:
    return {region.total_heads for region in layout.regions}


def _check_size(prefill_tp_size: int, prefill_pp_size: int) -> None:
    if min(prefill_tp_size, prefill_pp_size) < 1 or prefill_tp_size * prefill_pp_size > MAX_RANKS:
        raise Incompatible(
            f"a prefill engine of {prefill_tp_size} x {prefill_pp_size} ranks; 1 to {MAX_RANKS} are supported"
        )


def producers_of(layout: KVLayout, prefill_tp_size: int, prefill_pp_size: int) -> tuple[int, ...]:
    """The prefill ranks (`stage * tp_size + tp_rank`) that feed the decode rank with this layout. Raises Incompatible."""
    _check_size(prefill_tp_size, prefill_pp_size)
    totals = _totals(layout)
    feeding = [
        rank for rank in range(prefill_tp_size) if _feeds(totals, prefill_tp_size, rank, layout.tp_size, layout.tp_rank)
    ]
    return tuple(stage * prefill_tp_size + rank for stage in range(prefill_pp_size) for rank in feeding)


def num_readers(layout: KVLayout, prefill_tp_size: int, prefill_rank: int) -> int:
    """How many ranks of the decode engine that `layout` belongs to are fed by this prefill rank. Raises Incompatible."""
    totals = _totals(layout)
    return sum(
        _feeds(totals, prefill_tp_size, prefill_rank % prefill_tp_size, layout.tp_size, reader)
        for reader in range(layout.tp_size)
    )


def unread_by_all(layout: KVLayout, prefill_tp_size: int, prefill_pp_size: int) -> tuple[int, ...]:
    """The prefill ranks whose copy no rank of this decode engine takes. Raises Incompatible."""
    _check_size(prefill_tp_size, prefill_pp_size)
    unread = [rank for rank in range(prefill_tp_size) if num_readers(layout, prefill_tp_size, rank) == 0]
    return tuple(stage * prefill_tp_size + rank for stage in range(prefill_pp_size) for rank in unread)
