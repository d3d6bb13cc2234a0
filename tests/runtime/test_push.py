"""Push: the prefill side writes. Every order of arrival, streaming, prefixes, preemption."""

from __future__ import annotations

import threading

import msgspec
import pytest

from kvbaton.runtime.events import SourceAdvanced, SourceRevoked
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import RequestId
from tests.runtime.world import TID, World

P_BLOCKS = [3, 4, 5, 9, 2]
D_BLOCKS = [11, 12, 13, 6, 7]
NUM_TOKENS = 18  # four whole blocks and half of the fifth


def test_registration_first() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert p.num_transfers == d.num_transfers == 1
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_source_first() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert not p.sent  # held until somebody comes
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_both_at_once() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.turn()  # the registration lies in P's mailbox when its own commands come
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 17, 19, 20])
def test_any_length_of_prompt(num_tokens: int) -> None:
    world = World()
    p, d = world.pair()
    num_blocks = -(-num_tokens // 4)
    p.prefill(num_tokens, P_BLOCKS[:num_blocks])
    d.open_destination(p.ticket(), num_tokens, D_BLOCKS[:num_blocks])
    world.run()
    assert d.holds(D_BLOCKS[:num_blocks], p, P_BLOCKS[:num_blocks])
    world.check()


def test_only_what_the_destination_lacks_is_written() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS, first_token=8)
    world.run()
    assert d.holds(D_BLOCKS[2:], p, P_BLOCKS[2:])
    assert (d.pool[:, D_BLOCKS[:2]] == d.before[:, D_BLOCKS[:2]]).all()
    world.check()


def test_chunks_are_written_while_the_next_computes() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(9, P_BLOCKS[:3], last=False)
    world.run()
    assert d.holds(D_BLOCKS[:2], p, P_BLOCKS[:2])
    assert not d.holds(D_BLOCKS[2:3], p, P_BLOCKS[2:3])  # its block is not final
    assert not d.received
    p.advance(16, P_BLOCKS[:4], last=False)
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_segments_may_land_in_any_order() -> None:
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=20 - number)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    for num_tokens in (4, 8, 12, 16):
        p.advance(num_tokens, P_BLOCKS, last=False)
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_notification_that_comes_twice_counts_once() -> None:
    world = World(fabric=Fabric(script=lambda _number: Fate(notifies=2)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(8, P_BLOCKS, last=False)
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_last_chunk_that_adds_no_block_still_ends_the_transfer() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), 8, D_BLOCKS[:2])
    p.open_source()
    p.advance(8, P_BLOCKS[:2], last=False)
    world.run()
    p.advance(8, P_BLOCKS[:2])
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS[:2], p, P_BLOCKS[:2])
    assert not d.failures
    world.check()


def test_many_transfers_share_one_introduction() -> None:
    world = World()
    p, d = world.pair()
    for index in range(5):
        tid, rid = TID.__class__(f"t{index}"), str(index)
        d.open_destination(p.ticket(tid=tid), 4, [10 + index], rid=f"d{rid}")
        p.prefill(4, [1 + index], tid=tid, rid=f"p{rid}")
    world.run()
    assert d.holds([10, 11, 12, 13, 14], p, [1, 2, 3, 4, 5])
    assert len(p.rank.peers) == 1
    world.check()


def test_two_destinations_of_one_source() -> None:
    world = World()
    p, d = world.pair()
    other = world.engine("D2")
    for index, engine in enumerate((d, other)):
        tid = TID.__class__(f"t{index}")
        engine.open_destination(p.ticket(tid=tid), NUM_TOKENS, D_BLOCKS)
        p.prefill(NUM_TOKENS, P_BLOCKS, tid=tid, rid=f"p{index}")
    world.run()
    for engine in (d, other):
        assert engine.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_an_engine_may_be_source_and_destination_at_once() -> None:
    world = World()
    a, b = world.engine("A"), world.engine("B")
    there, back = TID.__class__("there"), TID.__class__("back")
    a.prefill(8, [1, 2], tid=there, rid="p")
    b.prefill(8, [1, 2], tid=back, rid="p")
    b.open_destination(a.ticket(tid=there), 8, [10, 11])
    a.open_destination(b.ticket(tid=back), 8, [10, 11])
    world.run()
    assert b.holds([10, 11], a, [1, 2])
    assert a.holds([10, 11], b, [1, 2])
    world.check()


def test_rank_r_calls_the_rth_port_after_the_tickets() -> None:
    """Found: every rank called rank 0, whose layout is another rank's."""
    world = World()
    p0, p1 = world.engine("P", tp_size=2, port=5000), world.engine("P", tp_size=2, tp_rank=1, rank=1, port=5001)
    d1 = world.engine("D", tp_size=2, tp_rank=1, rank=1)
    p1.prefill(NUM_TOKENS, P_BLOCKS)
    d1.open_destination(msgspec.structs.replace(p0.ticket(), tp_size=2), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert d1.holds(D_BLOCKS, p1, P_BLOCKS)
    world.check()


def test_a_preempted_prefill_starts_over_and_only_the_new_generation_counts() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(8, [20, 21], last=False)  # blocks that the engine takes away again
    world.run()
    assert d.holds(D_BLOCKS[:2], p, [20, 21])
    p.advance(12, P_BLOCKS, last=False, generation=1)
    p.advance(NUM_TOKENS, P_BLOCKS, generation=1)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_new_generation_waits_for_what_the_old_one_has_in_flight() -> None:
    """Else the old bytes could land on top of the new ones."""
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=30 if number == 1 else 0)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(8, [20, 21], last=False)
    for _ in range(5):
        d.turn()
        p.turn()
    assert p.rank.mover.is_busy
    p.advance(NUM_TOKENS, P_BLOCKS, generation=1)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_revoked_blocks_are_released_when_nothing_reads_them(is_in_flight: bool) -> None:
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=30 * is_in_flight * (number == 1))))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(8, [20, 21], last=False)
    for _ in range(5):
        d.turn()
        p.turn()
    released = threading.Event()
    p.driver.submit([SourceRevoked(TID, RequestId("p"), released)])
    p.turn()
    assert released.is_set() != is_in_flight
    world.run()
    assert released.is_set()
    p.advance(NUM_TOKENS, P_BLOCKS, generation=1)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_revoking_what_is_over_releases_at_once() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    released = threading.Event()
    p.driver.submit([SourceRevoked(TID, RequestId("p"), released)])
    p.turn()
    assert released.is_set()
    world.check()


def test_what_landed_whole_is_delivered_even_when_its_prefill_is_preempted_meanwhile() -> None:
    """Found: it was computed again, and written again into blocks that the decode side had long been using."""
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=30 if number == 1 else 0)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(NUM_TOKENS, P_BLOCKS)
    for _ in range(5):
        d.turn()
        p.turn()
    p.driver.submit([SourceRevoked(TID, RequestId("p"), threading.Event())])
    world.run()
    assert d.received[RequestId("d")] == 1
    d.before[:], d.may_change = d.pool, set()
    p.pool[:] = p.before[:] = 0
    p.advance(NUM_TOKENS, P_BLOCKS, generation=1)
    p.finish()
    world.run()
    world.check()


class Device:
    """A stream of work that has passed our mark, or not yet."""

    is_past = False

    def query(self) -> bool:
        return self.is_past


def test_nothing_is_sent_before_the_device_has_computed_it() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    device = Device()
    p.driver.submit([SourceAdvanced(TID, RequestId("p"), 0, NUM_TOKENS, True, (tuple(P_BLOCKS),), device)])
    p.finish()
    world.run()
    assert world.fabric.num_operations == 1  # the greeting
    device.is_past = True
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_what_the_device_still_computes_of_a_preempted_prefill_is_not_sent() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    world.run()
    device = Device()
    p.driver.submit([SourceAdvanced(TID, RequestId("p"), 0, 8, False, ((20, 21),), device)])
    world.run()
    released = threading.Event()
    p.driver.submit([SourceRevoked(TID, RequestId("p"), released)])
    device.is_past = True
    world.run()
    assert released.is_set()
    assert world.fabric.num_operations == 1
    p.advance(NUM_TOKENS, P_BLOCKS, generation=1)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()
