"""Which ranks feed which: a stand-in until the whole geometry lands."""

from __future__ import annotations

from kvbaton.geometry.layout import KVLayout


def producers_of(layout: KVLayout, tp: int, pp: int) -> tuple[int, ...]:
    return (layout.tp_rank,)


def num_readers(layout: KVLayout, tp: int, rank: int) -> int:
    return 1


def unread_by_all(layout: KVLayout, tp: int, pp: int) -> tuple[int, ...]:
    return ()
