"""Words about one registration do not count for another of the same transfer, and a refusal calls nothing off anywhere."""

from __future__ import annotations

import msgspec

from kvbaton.protocol.messages import Renew, encode
from kvbaton.runtime.sidechannel import Endpoint
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId, TransferId
from tests.property.stage import Stage
from tests.runtime.memory_channel import HOST
from tests.runtime.ranks import ranks
from tests.runtime.test_attempts import (
    D_BLOCKS,
    NUM_TOKENS,
    OTHER_BLOCKS,
    P_BLOCKS,
    at_another_engine,
    both_directions,
    to_another_engine,
)
from tests.runtime.world import TID, World


@both_directions
def test_the_answer_to_a_reminder_does_not_end_the_next_attempt(direction: Direction) -> None:
    """The reminder of the first crosses its refusal."""
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS, TransferId("before"), "p before")
    d.open_destination(p.ticket(direction, TransferId("before")), NUM_TOKENS, D_BLOCKS, rid="before")
    world.run()
    at_another_engine(d, p.ticket(direction))
    d.turn()
    world.now_s += 6
    d.turn()  # a reminder is on its way as well
    p.turn()
    news = d.channel.receive()
    assert len(news) == 2
    first, second = news
    d.driver._hear(first, world.now_s)
    d.collect()
    assert RequestId("first") in d.failures
    d.open_destination(p.ticket(direction), NUM_TOKENS, OTHER_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.turn()
    d.driver._hear(second, world.now_s)
    d.collect()
    assert RequestId("d") not in d.failures
    world.run()
    assert d.holds(OTHER_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_a_refusal_by_one_rank_does_not_call_off_the_others(direction: Direction) -> None:
    world = World()
    ps = ranks(world, "P", port=500, tp=2)
    (d,) = ranks(world, "D", port=600)
    ticket = msgspec.structs.replace(ps[0].ticket(direction), tp_size=2)
    for p in ps:
        p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(to_another_engine(ticket), NUM_TOKENS, D_BLOCKS, rid="first")
    world.run()
    assert RequestId("first") in d.failures
    d.open_destination(ticket, NUM_TOKENS, D_BLOCKS)
    world.run()
    assert RequestId("d") not in d.failures
    world.check()


def test_a_late_notification_of_the_first_attempt_does_not_complete_the_second() -> None:
    """Nothing was written to the second's blocks."""
    world = World(fabric=Fabric(script=lambda number: Fate(notification_delay=1 if number == 1 else 0)))
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS, rid="first")
    d.turn()
    p.turn()
    d.turn()  # it is asked, as at every first call
    p.turn()
    assert RequestId("p") in p.sent
    d.cancel("first")
    d.turn()
    p.turn()
    d.turn()
    assert RequestId("first") in d.failures
    d.open_destination(p.ticket(), NUM_TOKENS, OTHER_BLOCKS)
    world.run()
    assert RequestId("d") in d.failures
    world.check()


def test_a_reminder_of_the_second_attempt_is_no_news_of_the_first() -> None:
    """The first's blocks were given back."""
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS, rid="first")
    world.run()
    (reader,) = p.driver._source._transfers[TID].readers.values()
    world.pass_time(20, p)
    p.advance(NUM_TOKENS, P_BLOCKS)
    renew = Renew(TID, d.rank.incarnation, answers=1, registration=reader.register.number + 1)
    p.turn()
    d.channel.send(Endpoint(HOST, p.channel.port), encode(renew))
    p.turn()
    assert p.rank.mover.is_busy is False
    assert not p.sent
    assert reader.question is not None
    p.finish()
    world.run()
    world.check()


def test_a_first_word_that_was_long_under_way_does_not_let_us_write() -> None:
    """Whoever gets no answer at its first call gives up sooner than where it has heard of us before, and fences nobody."""
    stage = Stage()
    stage.begin(0, 0, 0, NUM_TOKENS, 0)
    stage.open(0)
    stage.compute(0)
    stage.turn(0)
    stage.cut(0, 0)
    stage.want(0)
    stage.turn(1)
    for _ in range(47):
        stage.tick_apart(1, 1)
        stage.turn(0)
    stage.fate(0)
    stage.fate(2)  # a write that takes its time
    stage.heal()
    stage.cut(0, 0)
    for _ in range(6):
        stage.tick_apart(0, 1)
        stage.turn(1)
    stage.end()
