"""Which KV heads a rank holds. vLLM's rule, as arithmetic; layout.py and topology.py build on it."""

from __future__ import annotations

from kvbaton.errors import Incompatible


def owned_heads(total_heads: int, tp_size: int, tp_rank: int) -> range:
    """The heads, numbered over the whole layer, that rank `tp_rank` of `tp_size` holds; never empty.

    With fewer heads than ranks, `tp_size / total_heads` consecutive ranks hold the same one.
    Raises Incompatible when neither number divides the other.
    """
    if max(total_heads, tp_size) % min(total_heads, tp_size):
        raise Incompatible(
            f"{total_heads} KV heads cannot be spread over {tp_size} tensor-parallel ranks. Use a tensor-parallel size "
            "that divides the number of KV heads, or is a multiple of it."
        )
    if tp_size > total_heads:
        head = tp_rank // num_copies(total_heads, tp_size)
        return range(head, head + 1)
    heads_per_rank = total_heads // tp_size
    return range(tp_rank * heads_per_rank, (tp_rank + 1) * heads_per_rank)


def num_copies(total_heads: int, tp_size: int) -> int:
    """How many ranks hold the same head."""
    return max(1, tp_size // total_heads)
