"""Joining pieces that are neighbours on both sides. The one place where descriptors are merged."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def join(ours: Int64Array, theirs: Int64Array, num_bytes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same (our byte, their byte) pairs in as few pieces as there are runs; sorted by our side.

    int64[num_pieces] each, not empty: where a piece starts here, where at the peer, its length. Sorting first is what
    joins pieces that were listed downwards, or in any other order, as long as both sides agree.
    """
    order = np.argsort(ours, kind="stable")
    ours, theirs, num_bytes = ours[order], theirs[order], num_bytes[order]
    starts = np.ones(ours.size, dtype=bool)
    starts[1:] = (ours[1:] != ours[:-1] + num_bytes[:-1]) | (theirs[1:] != theirs[:-1] + num_bytes[:-1])
    first = np.flatnonzero(starts)
    return ours[first], theirs[first], np.add.reduceat(num_bytes, first)
