"""Which heads a rank holds."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.heads import num_copies, owned_heads


@pytest.mark.parametrize(
    ("total_heads", "tp_size", "expected", "copies"),
    [
        (8, 1, [range(8)], 1),
        (8, 2, [range(4), range(4, 8)], 1),
        (2, 2, [range(1), range(1, 2)], 1),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)], 2),
        (1, 4, [range(1)] * 4, 4),
    ],
)
def test_heads_are_dealt_out_in_order_and_copied_when_there_are_too_few(
    total_heads: int, tp_size: int, expected: list[range], copies: int
) -> None:
    assert [owned_heads(total_heads, tp_size, rank) for rank in range(tp_size)] == expected
    assert num_copies(total_heads, tp_size) == copies


@pytest.mark.parametrize(("total_heads", "tp_size"), [(4, 3), (3, 4), (6, 4)])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(total_heads: int, tp_size: int) -> None:
    with pytest.raises(Incompatible, match=f"{total_heads} KV heads .* tensor-parallel size {tp_size}. Choose a size"):
        owned_heads(total_heads, tp_size, 0)
