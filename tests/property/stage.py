"""Two or three engines on a stage: everything their schedulers may do, every fault, and what must hold after each step.

A step is a method of `Stage` with small numbers as arguments, and does nothing where it makes no sense; so any list of
steps is a schedule, also one with steps left out. The ledger (ledger.py) knows who owns which block: a byte that moves into
or out of a block of somebody else fails at once. Used by test_storms.py (seeded) and test_stage_machine.py (Hypothesis).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from kvbaton.runtime.events import SourceRevoked
from kvbaton.runtime.peers import IDLE_S
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId, TransferId
from tests.property.ledger import Claim, Ledger
from tests.runtime.memory_channel import MemoryChannel, Network
from tests.runtime.world import BLOCK_SIZE, NUM_BLOCKS, Engine, World

NUM_TOKENS = 14  # three whole blocks and half of the fourth
BLOCKS_PER_STORY = 4
MAX_STORIES = 5
FOREVER = 10**9
TICK_S = 2.5
SETTLING_S = 150.0
"""No engine needs longer to end what it has: the longest chain is a lease, a drain, letting go, and a drain of the peer."""

FATES = (
    Fate(),
    Fate(delay_polls=2),
    Fate(delay_polls=FOREVER),
    Fate(delay_polls=FOREVER, num_landed_early=1),
    Fate(fails_at_post=True),
    Fate(fails_at_post=True, num_landed_early=2),
    Fate(fails_at_poll=True),
    Fate(fails_at_poll=True, delay_polls=3, num_landed_early=1),
    Fate(fails_at_poll=True, keeps_moving=True, num_refusals=3),
    Fate(fails_at_poll=True, keeps_moving=True, num_refusals=FOREVER),
    Fate(num_refusals=2),
    Fate(notifies=0),
    Fate(notifies=2),
    Fate(notification_delay=3),
    Fate(corrupts_notification=True),
)
CASTS = ((1, 1), (1, 2), (2, 1))
"""(prefill engines, decode engines)"""


@dataclass
class Story:
    """One transfer as its two engines tell it to their drivers."""

    index: int
    p: int
    d: int
    direction: Direction
    chunk_tokens: int
    first_token: int
    generation: int = 0
    num_computed: int = 0
    at_prefill: str = "new"
    """new, computing, preempting, computed, finished, released"""
    at_decode: str = "new"
    """new, waiting, over"""
    p_blocks: list[int] = field(default_factory=list)
    d_blocks: list[int] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    is_held: bool = False

    @property
    def tid(self) -> TransferId:
        return TransferId(f"t{self.index}")

    @property
    def p_rid(self) -> str:
        return f"p{self.index}"

    @property
    def d_rid(self) -> str:
        return f"d{self.index}"

    @property
    def received_blocks(self) -> list[int]:
        return self.d_blocks[self.first_token // BLOCK_SIZE :]


class Stage:
    def __init__(self, cast: int = 0) -> None:
        num_prefills, num_decodes = CASTS[cast]
        self.fates: deque[Fate] = deque()
        self.copies: deque[int] = deque()
        self.link_polls: deque[int] = deque()
        self.world = World(
            fabric=Fabric(script=lambda _number: self.fates.popleft() if self.fates else Fate()),
            network=Network(num_copies=lambda: self.copies.popleft() if self.copies else 1),
        )
        self.world.fabric.connect_polls = lambda: self.link_polls.popleft() if self.link_polls else 0
        self.prefills = [self.world.engine(f"P{index}") for index in range(num_prefills)]
        self.decodes = [self.world.engine(f"D{index}") for index in range(num_decodes)]
        self.ledger = Ledger(self.world)
        self.world.fabric.witness = self.ledger.witness
        self.stopped: set[str] = set()
        self.stories: list[Story] = []
        self.num_incarnations = 1
        self.ledger.is_calm = True

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, *self.decodes]

    def _story(self, index: int) -> Story | None:
        return self.stories[index % len(self.stories)] if self.stories else None

    # -- what schedulers do ------------------------------------------------------------------------------------------

    def begin(self, p: int, d: int, is_pull: int, chunk_tokens: int, first_block: int) -> None:
        """A request is dispatched; nothing has happened yet."""
        if len(self.stories) < MAX_STORIES:
            self.stories.append(
                Story(
                    len(self.stories),
                    p % len(self.prefills),
                    d % len(self.decodes),
                    Direction.PULL if is_pull else Direction.PUSH,
                    max(1, chunk_tokens),
                    BLOCK_SIZE * first_block,
                )
            )

    def open(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_prefill == "new" and self.prefills[story.p].is_alive:
            story.at_prefill = "computing"
            self.prefills[story.p].open_source(story.tid, story.p_rid)

    def compute(self, index: int) -> None:
        """The next chunk; its blocks now hold what nobody else's do."""
        story = self._story(index)
        if story is None or story.at_prefill != "computing":
            return
        engine = self.prefills[story.p]
        if not story.p_blocks:
            claim = Claim("source", story.index, story.generation)
            story.p_blocks = self.ledger.take(engine, BLOCKS_PER_STORY, claim)
            if not story.p_blocks:
                return  # the pool is full: it stays in the queue
        story.num_computed = min(NUM_TOKENS, story.num_computed + story.chunk_tokens)
        is_last = story.num_computed == NUM_TOKENS
        num_blocks = -(-story.num_computed // BLOCK_SIZE)
        engine.pool[:, story.p_blocks] = self.ledger.value(story.index, story.generation)
        engine.advance(
            story.num_computed,
            story.p_blocks[:num_blocks],
            last=is_last,
            generation=story.generation,
            tid=story.tid,
            rid=story.p_rid,
        )
        if is_last:
            story.at_prefill = "computed"

    def finish(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_prefill == "computed":
            self._finish(story, is_aborted=False)

    def abort(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_prefill in {"computing", "computed"}:
            self._finish(story, is_aborted=True)

    def _finish(self, story: Story, *, is_aborted: bool) -> None:
        story.at_prefill = "finished"
        self.prefills[story.p].finish(story.tid, story.p_rid, aborted=is_aborted)

    def preempt(self, index: int) -> None:
        """The engine wants the blocks back, and has them when nothing reads them (`_look`)."""
        story = self._story(index)
        if story is not None and story.at_prefill in {"computing", "computed"} and story.p_blocks:
            story.at_prefill = "preempting"
            story.released = threading.Event()
            revoked = SourceRevoked(story.tid, RequestId(story.p_rid), story.released)
            self.prefills[story.p].driver.submit([revoked])

    def want(self, index: int) -> None:
        story = self._story(index)
        if story is None or story.at_decode != "new" or not self.decodes[story.d].is_alive:
            return
        engine, claim = self.decodes[story.d], Claim("destination", story.index)
        story.d_blocks = self.ledger.take(engine, BLOCKS_PER_STORY, claim)
        if story.d_blocks:
            story.at_decode = "waiting"
            self.ledger.own(engine, story.d_blocks[: story.first_token // BLOCK_SIZE], Claim("cached", story.index))
            engine.open_destination(
                self.prefills[story.p].ticket(story.direction, story.tid),
                NUM_TOKENS,
                story.d_blocks,
                first_token=story.first_token,
                rid=story.d_rid,
            )

    def cancel(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_decode == "waiting":
            self.decodes[story.d].cancel(story.d_rid)

    def spurn(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_decode == "new" and self.decodes[story.d].is_alive:
            story.at_decode = "over"
            self.decodes[story.d].nothing_needed(self.prefills[story.p].ticket(story.direction, story.tid))

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def fate(self, kind: int) -> None:
        """Of the next operation or notification that has none yet."""
        self.fates.append(FATES[kind % len(FATES)])

    def message(self, num_copies: int) -> None:
        """The next word on the side channel that has no fate yet is lost, or comes twice."""
        self.ledger.is_calm &= num_copies > 0
        self.copies.append(num_copies)

    def slow_link(self, num_polls: int) -> None:
        self.link_polls.append(num_polls)

    def land(self) -> None:
        for engine in self.engines:
            for posted in engine.transport.posted.values():
                posted.polls_left = posted.refusals_left = 0

    def stop(self, engine: int) -> None:
        """Its process stands still."""
        self.ledger.is_calm = False
        self.stopped.add(self._engine(engine).name)

    def resume(self, engine: int) -> None:
        self.stopped.discard(self._engine(engine).name)

    def cut(self, p: int, d: int) -> None:
        self.ledger.is_calm = False
        self.world.network.cut(*self._channels(p, d))

    def heal(self) -> None:
        self.world.network.heal()

    def break_line(self, p: int, d: int) -> None:
        self.ledger.is_calm = False
        called, calling = self._channels(p, d)
        self.world.network.break_lines(calling, called)

    def _channels(self, p: int, d: int) -> tuple[MemoryChannel, MemoryChannel]:
        channels = (self.prefills[p % len(self.prefills)].channel, self.decodes[d % len(self.decodes)].channel)
        assert isinstance(channels[0], MemoryChannel)
        assert isinstance(channels[1], MemoryChannel)
        return channels[0], channels[1]

    def crash(self, engine: int) -> None:
        """The process is gone, and with it every request it had."""
        victim = self._engine(engine)
        if not victim.is_alive:
            return
        victim.crash()
        self.ledger.is_calm = False
        self.ledger.forget(victim)
        for story in self.stories:
            if self.prefills[story.p] is victim and story.at_prefill != "new":
                story.at_prefill = "released"
            if self.decodes[story.d] is victim and story.at_decode != "new":
                story.at_decode = "over"

    def restart(self, engine: int) -> None:
        """Another process of the same name, at the same port."""
        old = self._engine(engine)
        if old.is_alive:
            return
        self.num_incarnations += 1
        self.world.engines.remove(old)
        new = self.world.engine(old.name, port=old.channel.port, incarnation=f"life {self.num_incarnations}")
        for side in (self.prefills, self.decodes):
            if old in side:
                side[side.index(old)] = new
        self.stopped.discard(new.name)
        self.ledger.enter(new)

    def _engine(self, number: int) -> Engine:
        return self.engines[number % len(self.engines)]

    # -- time --------------------------------------------------------------------------------------------------------

    def turn(self, engine: int) -> None:
        self._turn(self._engine(engine))

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for engine in self.engines:
                self._turn(engine)

    def pass_time(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self.world.now_s += TICK_S
            self.run(2)

    def tick_apart(self, engine: int, tenths: int) -> None:
        """Only this engine gets its turn while a little time passes."""
        self.world.now_s += tenths / 10
        self._turn(self._engine(engine))

    def _turn(self, engine: Engine) -> None:
        if not engine.is_alive or engine.name in self.stopped:
            return
        num_before = engine.num_reports
        engine.turn()
        if engine.num_reports > num_before:
            self._take_reports(engine)
        self._look(engine)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _take_reports(self, engine: Engine) -> None:
        for story in self.stories:
            is_sent = story.at_prefill == "finished" and self.prefills[story.p] is engine
            if is_sent and engine.sent[RequestId(story.p_rid)]:
                story.at_prefill = "released"
                self.ledger.give_back(engine, story.p_blocks, Claim("source", story.index, story.generation))
            is_received = story.at_decode == "waiting" and self.decodes[story.d] is engine
            if is_received and engine.received[RequestId(story.d_rid)]:
                story.at_decode = "over"
                if RequestId(story.d_rid) not in engine.failures:
                    self.ledger.check_delivered(engine, story.received_blocks, story.index, story.generation)
                self.ledger.give_back(engine, story.received_blocks, Claim("destination", story.index))
                cached = story.d_blocks[: story.first_token // BLOCK_SIZE]
                self.ledger.give_back(engine, cached, Claim("cached", story.index))
        counts = [*engine.sent.values(), *engine.received.values()]
        assert max(counts) == 1, f"{engine.name} reported a request twice"

    def _look(self, engine: Engine) -> None:
        """A preempted request gives its blocks up as soon as it may, and begins anew."""
        for story in self.stories:
            is_here = story.at_prefill == "preempting" and self.prefills[story.p] is engine
            if is_here and story.released.is_set():
                self.ledger.give_back(engine, story.p_blocks, Claim("source", story.index, story.generation))
                story.p_blocks = []
                story.at_prefill = "computing"
                story.generation += 1
                story.num_computed = 0

    def end(self) -> None:
        """Nothing goes wrong any more; who stands still stays so at first. All that lives settles, and nothing is left."""
        self.fates.clear()
        self.copies.clear()
        self.link_polls.clear()
        self.land()
        self.heal()
        still, self.stopped = set(self.stopped), self.stopped
        self._settle()
        if still:
            self.stopped.clear()
            self.land()
            self._settle()
        self.world.now_s += IDLE_S + 1
        self.run(2)
        for engine in self.engines:
            if engine.is_alive:
                self._check(engine)

    def _settle(self) -> None:
        end_s = self.world.now_s + SETTLING_S
        while self.world.now_s < end_s:
            for story in self.stories:
                self._go_on(story)
            self.pass_time(1)
            awake = [each for each in self.engines if each.is_alive and each.name not in self.stopped]
            if all(self._is_done(each) for each in awake):
                return
        awake = [each for each in self.engines if each.is_alive and each.name not in self.stopped]
        left = [f"{each.name}: {each.num_transfers} transfers" for each in awake if not self._is_done(each)]
        raise AssertionError(f"not over within {SETTLING_S:.0f} s: {', '.join(left)}; {self._unfinished()}")

    def _go_on(self, story: Story) -> None:
        engine = self.prefills[story.p]
        if engine.is_alive and engine.name not in self.stopped:
            self.compute(story.index)
            self.finish(story.index)

    def _is_done(self, engine: Engine) -> bool:
        if engine.num_transfers or engine.is_busy or engine.transport.posted:
            return False
        mine = [story for story in self.stories if self.prefills[story.p] is engine]
        return all(story.at_prefill in {"new", "released"} for story in mine) and not any(
            story.at_decode == "waiting" for story in self.stories if self.decodes[story.d] is engine
        )

    def _unfinished(self) -> list[tuple[str, str, str]]:
        return [(str(story.tid), story.at_prefill, story.at_decode) for story in self.stories]

    def _check(self, engine: Engine) -> None:
        engine.may_change = set(range(NUM_BLOCKS))  # the ledger has seen every byte that moved
        engine.check()
        self.ledger.check_empty(engine)
        assert len(engine.rank.peers) == 0, f"{engine.name} still remembers peers"
        assert isinstance(engine.channel, MemoryChannel)
        assert engine.channel.num_lines == 0, f"{engine.name} still has lines"
