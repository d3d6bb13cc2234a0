"""Several ranks on either side: every decode rank gets its heads and layers, and every prefill rank frees its blocks once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvbaton.protocol.params import DecodeTicket
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId
from tests.runtime.ranks import ranks
from tests.runtime.world import BLOCK_BYTES, LAYERS, Engine, World

PUSH, PULL = Direction.PUSH, Direction.PULL
P_BLOCKS = [3, 4, 5, 9, 2]
D_BLOCKS = [11, 12, 13, 6, 7]
NUM_TOKENS = 18
FOREVER = 10**9
P, D = RequestId("p"), RequestId("d")

both_directions = pytest.mark.parametrize("direction", [PUSH, PULL])


def ticket(prefill: list[Engine], direction: Direction, *, pp: int = 1) -> DecodeTicket:
    plain = prefill[0].ticket(direction)
    return msgspec.structs.replace(plain, tp_size=len(prefill) // pp, pp_size=pp)


def prefill_all(prefill: list[Engine]) -> None:
    for engine in prefill:
        engine.prefill(NUM_TOKENS, P_BLOCKS)


def want_all(decode: list[Engine], wanted: DecodeTicket) -> None:
    for engine in decode:
        engine.open_destination(wanted, NUM_TOKENS, D_BLOCKS)


def head(
    engine: Engine, layer: int, slot: int, blocks: list[int], *, total_heads: int = 2, before: bool = False
) -> bytes:
    size = BLOCK_BYTES // total_heads
    pool = engine.before if before else engine.pool
    return np.ascontiguousarray(pool[layer, blocks, slot * size : (slot + 1) * size]).tobytes()


@both_directions
def test_two_prefill_ranks_feed_one_decode_rank(direction: Direction) -> None:
    world = World()
    prefill, (d,) = ranks(world, "P", port=500, tp=2), ranks(world, "D", port=600)
    want_all([d], ticket(prefill, direction))
    prefill_all(prefill[:1])
    world.run()
    assert not d.received  # half of the heads is not all of them
    prefill_all(prefill[1:])
    world.run()
    assert not d.failures
    for layer in range(len(LAYERS)):
        for slot, p in enumerate(prefill):
            assert head(d, layer, slot, D_BLOCKS) == head(p, layer, 0, P_BLOCKS, before=True)
    world.check()


@both_directions
def test_one_prefill_rank_feeds_two_decode_ranks_and_frees_its_blocks_after_both(direction: Direction) -> None:
    world = World()
    (p,), decode = ranks(world, "P", port=500), ranks(world, "D", port=600, tp=2)
    prefill_all([p])
    want_all(decode[:1], ticket([p], direction))
    world.run()
    assert decode[0].received[D] == 1
    assert not p.sent
    want_all(decode[1:], ticket([p], direction))
    world.run()
    assert p.sent[P] == 1
    for layer in range(len(LAYERS)):
        for slot, d in enumerate(decode):
            assert not d.failures
            assert head(d, layer, 0, D_BLOCKS) == head(p, layer, slot, P_BLOCKS, before=True)
    world.check()


@both_directions
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2)])
def test_of_a_replicated_cache_every_decode_rank_gets_its_copy(
    direction: Direction, prefill_tp: int, decode_tp: int
) -> None:
    world = World()
    prefill = ranks(world, "P", port=500, tp=prefill_tp, total_heads=1)
    decode = ranks(world, "D", port=600, tp=decode_tp, total_heads=1)
    for p in prefill:
        p.before[:] = p.pool[:] = prefill[0].pool
    want_all(decode, ticket(prefill, direction))
    prefill_all(prefill)
    world.run()
    for d in decode:
        assert not d.failures
        assert d.holds(D_BLOCKS, prefill[0], P_BLOCKS)
    world.check()  # also a copy that nobody reads was given back


@both_directions
def test_the_stages_of_a_pipeline_feed_their_layers(direction: Direction) -> None:
    world = World()
    prefill, (d,) = ranks(world, "P", port=500, pp=2), ranks(world, "D", port=600)
    prefill_all(prefill)
    want_all([d], ticket(prefill, direction, pp=2))
    world.run()
    assert not d.failures
    for layer, p in enumerate(prefill):
        assert (d.pool[layer, D_BLOCKS] == p.before[layer, P_BLOCKS]).all()
    world.check()


@both_directions
def test_a_leg_that_fails_takes_the_others_along_and_the_request_is_reported_once(direction: Direction) -> None:
    world = World()
    prefill, (d,) = ranks(world, "P", port=500, tp=2), ranks(world, "D", port=600)
    want_all([d], ticket(prefill, direction))
    for p in prefill:
        p.open_source()
    world.run()
    prefill[0].finish(aborted=True)
    prefill_all(prefill[1:])
    world.run()
    assert "the prefill request was aborted" in d.failures[D]
    assert d.received[D] == 1
    world.check()


def turn_all(engines: list[Engine]) -> None:
    for _ in range(5):
        for engine in engines:
            engine.turn()


@both_directions
def test_a_request_is_not_given_back_while_another_leg_of_it_still_moves(direction: Direction) -> None:
    # The two greetings come first; the third operation is the first that moves bytes, or the third greeting.
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=FOREVER if number >= 2 else 0)))
    prefill, (d,) = ranks(world, "P", port=500, tp=2), ranks(world, "D", port=600)
    for p in prefill:
        p.open_source()
    want_all([d], ticket(prefill, direction))
    turn_all(world.engines)
    prefill[0].advance(NUM_TOKENS, P_BLOCKS)
    prefill[0].finish()
    turn_all(world.engines)
    poster = prefill[0] if direction is PUSH else d
    assert poster.rank.mover.is_busy
    prefill[1].finish(held=False, aborted=True)
    turn_all(world.engines)
    assert not d.received
    for posted in poster.transport.posted.values():
        posted.polls_left = 0
    world.run()
    assert d.received[D] == 1
    assert "aborted" in d.failures[D]
    world.pass_time(60)
    world.check()


@both_directions
def test_when_one_prefill_rank_dies_the_request_fails_and_the_other_ranks_are_freed(direction: Direction) -> None:
    world = World()
    prefill, (d,) = ranks(world, "P", port=500, tp=2), ranks(world, "D", port=600)
    want_all([d], ticket(prefill, direction))
    world.run()
    prefill[0].crash()
    world.run(prefill[1], d)
    assert "is gone" in d.failures[D]
    prefill_all(prefill[1:])
    world.run(prefill[1], d)
    assert prefill[1].sent[P] == 1
    prefill[1].check()
    d.check()


@both_directions
def test_decode_ranks_that_do_not_come_are_waited_for_no_longer_than_the_lease(direction: Direction) -> None:
    world = World()
    (p,), decode = ranks(world, "P", port=500), ranks(world, "D", port=600, tp=2)
    prefill_all([p])
    want_all(decode[:1], ticket([p], direction))
    world.run()
    assert not p.sent
    world.pass_time(31)
    assert p.sent[P] == 1
    want_all(decode[1:], ticket([p], direction))
    world.run()
    assert "1 of 2 decode ranks registered before the lease ended" in decode[1].failures[D]
    world.check()


@both_directions
def test_a_decode_request_that_needs_nothing_frees_every_prefill_rank(direction: Direction) -> None:
    world = World()
    prefill, (d,) = ranks(world, "P", port=500, tp=2, pp=2), ranks(world, "D", port=600)
    prefill_all(prefill)
    d.nothing_needed(ticket(prefill, direction, pp=2))
    world.run()
    assert all(p.sent[P] == 1 for p in prefill)
    world.check()


@both_directions
def test_sizes_that_do_not_divide_the_heads_are_refused_at_once(direction: Direction) -> None:
    world = World()
    prefill, (d,) = ranks(world, "P", port=500, tp=3), ranks(world, "D", port=600)
    want_all([d], ticket(prefill, direction))
    world.run()
    assert "3" in d.failures[D]
    assert "2" in d.failures[D]
    world.check()


def test_decode_ranks_that_disagree_on_their_number_are_refused() -> None:
    world = World()
    (p,), decode = ranks(world, "P", port=500), ranks(world, "D", port=600, tp=2)
    stranger = ranks(world, "X", port=700)[0]
    want_all(decode[:1], ticket([p], PUSH))
    world.run()
    want_all([stranger], ticket([p], PUSH))
    world.run()
    assert "1 ranks take the transfer from here, another one said 2" in stranger.failures[D]
    want_all(decode[1:], ticket([p], PUSH))
    prefill_all([p])
    world.run()
    assert not decode[0].failures
    assert not decode[1].failures
    stranger.may_change.clear()
    world.check()
