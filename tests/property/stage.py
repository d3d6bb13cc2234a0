"""Two or three engines of one or two ranks on a stage: what their schedulers may do, every fault, and what must hold.

A step is a method of `Stage` with small numbers as arguments, and does nothing where it makes no sense; so any list of
steps is a schedule, also one with steps left out. The ledger (ledger.py) knows who owns which block: a byte that moves into
or out of a block of somebody else fails at once. Used by test_storms.py (seeded) and test_stage_machine.py (Hypothesis).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvbaton.protocol.params import DecodeTicket
from kvbaton.runtime.events import SourceRevoked
from kvbaton.runtime.peers import IDLE_S
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId, TransferId
from tests.property.group import Claim, Group
from tests.property.ledger import Ledger
from tests.runtime.memory_channel import MemoryChannel, Network
from tests.runtime.world import BLOCK_SIZE, NUM_BLOCKS, Engine, World

NUM_TOKENS = 14  # three whole blocks and half of the fourth
BLOCKS_PER_STORY = 4
MAX_STORIES = 5
MAX_ATTEMPTS = 2
FOREVER = 10**9
TICK_S = 2.5
PROMPT_S = 20.0
"""Shorter than any lease: where nothing went wrong and both sides have spoken, nobody waits for a clock."""
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
CASTS = (
    ((1,), (1,)),
    ((1,), (1, 1)),
    ((1, 1), (1,)),
    ((2,), (1,)),
    ((1,), (2,)),
    ((2,), (2,)),
    ((1, 2), (1,)),
    ((1,), (2, 1)),
)
"""(tensor-parallel sizes of the prefill engines, and of the decode engines)"""


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
    attempt: int = 0
    """Of the decode side, with the same ticket."""
    released: list[threading.Event] = field(default_factory=list)
    """Preempted: what each rank says when nothing reads the blocks any more."""

    @property
    def tid(self) -> TransferId:
        return TransferId(f"t{self.index}")

    @property
    def p_rid(self) -> str:
        return f"p{self.index}"

    @property
    def d_rid(self) -> str:
        return f"d{self.index}.{self.attempt}"

    @property
    def is_known_to_both(self) -> bool:
        return (self.at_prefill == "new") == (self.at_decode == "new")

    @property
    def received_blocks(self) -> list[int]:
        return self.d_blocks[self.first_token // BLOCK_SIZE :]


class Stage:
    def __init__(self, cast: int = 0) -> None:
        self.fates: deque[Fate] = deque()
        self.copies: deque[int] = deque()
        self.link_polls: deque[int] = deque()
        self.world = World(
            fabric=Fabric(script=lambda _number: self.fates.popleft() if self.fates else Fate()),
            network=Network(num_copies=lambda: self.copies.popleft() if self.copies else 1),
        )
        self.world.fabric.connect_polls = lambda: self.link_polls.popleft() if self.link_polls else 0
        prefills, decodes = CASTS[cast]
        self.prefills = [Group(self.world, f"P{index}", tp, 500 + 10 * index) for index, tp in enumerate(prefills)]
        self.decodes = [Group(self.world, f"D{index}", tp, 600 + 10 * index) for index, tp in enumerate(decodes)]
        self.groups = [*self.prefills, *self.decodes]
        self.ledger = Ledger(self.world, self.groups)
        self.world.fabric.witness = self.ledger.witness
        self.stopped: set[int] = set()
        """Ports of the processes that stand still."""
        self.stories: list[Story] = []
        self.is_faultless = True

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
            for rank in self.prefills[story.p].ranks:
                rank.open_source(story.tid, story.p_rid)

    def compute(self, index: int) -> None:
        """The next chunk; its blocks now hold what nobody else's do."""
        story = self._story(index)
        if story is None or story.at_prefill != "computing":
            return
        engine = self.prefills[story.p]
        if not story.p_blocks:
            story.p_blocks = engine.take(BLOCKS_PER_STORY, Claim("source", story.index, story.generation))
            if not story.p_blocks:
                return  # the pool is full: it stays in the queue
        story.num_computed = min(NUM_TOKENS, story.num_computed + story.chunk_tokens)
        is_last = story.num_computed == NUM_TOKENS
        blocks = story.p_blocks[: -(-story.num_computed // BLOCK_SIZE)]
        engine.fill(story.p_blocks, self.ledger.value(story.index, story.generation))
        for rank in engine.ranks:
            rank.advance(
                story.num_computed,
                blocks,
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
        for rank in self.prefills[story.p].ranks:
            rank.finish(story.tid, story.p_rid, aborted=is_aborted)

    def preempt(self, index: int) -> None:
        """The engine wants the blocks back, and has them when nothing reads them (`_look`)."""
        story = self._story(index)
        if story is not None and story.at_prefill in {"computing", "computed"} and story.p_blocks:
            story.at_prefill = "preempting"
            story.released = []
            for rank in self.prefills[story.p].ranks:
                story.released.append(threading.Event())
                rank.driver.submit([SourceRevoked(story.tid, RequestId(story.p_rid), story.released[-1])])

    def want(self, index: int) -> None:
        """Also once more, where an attempt is over: a client that was told to come again comes with the same ticket."""
        story = self._story(index)
        if story is None or story.at_decode == "waiting" or not self.decodes[story.d].is_alive:
            return
        if story.at_decode == "over":
            if story.attempt == MAX_ATTEMPTS:
                return
            story.attempt += 1
        engine = self.decodes[story.d]
        story.d_blocks = engine.take(BLOCKS_PER_STORY, Claim("destination", story.index))
        if story.d_blocks:
            story.at_decode = "waiting"
            engine.own(story.d_blocks[: story.first_token // BLOCK_SIZE], Claim("cached", story.index))
            for rank in engine.ranks:
                rank.open_destination(
                    self._ticket(story), NUM_TOKENS, story.d_blocks, first_token=story.first_token, rid=story.d_rid
                )

    def _ticket(self, story: Story) -> DecodeTicket:
        prefill = self.prefills[story.p]
        return replace(prefill.ranks[0].ticket(story.direction, story.tid), tp_size=prefill.tp)

    def cancel(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_decode == "waiting":
            for rank in self.decodes[story.d].ranks:
                rank.cancel(story.d_rid)

    def spurn(self, index: int) -> None:
        story = self._story(index)
        if story is not None and story.at_decode == "new" and self.decodes[story.d].is_alive:
            story.at_decode = "over"
            for rank in self.decodes[story.d].ranks:
                rank.nothing_needed(self._ticket(story))

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def fate(self, kind: int) -> None:
        """Of the next operation or notification that has none yet."""
        self.is_faultless = False
        self.fates.append(FATES[kind % len(FATES)])

    def message(self, num_copies: int) -> None:
        """The next word on the side channel that has no fate yet is lost, or comes twice."""
        self.ledger.is_calm &= num_copies > 0
        self.is_faultless = False
        self.copies.append(num_copies)

    def slow_link(self, num_polls: int) -> None:
        self.link_polls.append(num_polls)

    def land(self) -> None:
        for rank in self._ranks():
            for posted in rank.transport.posted.values():
                posted.polls_left = posted.refusals_left = 0

    def drift(self, rank: int, num_pieces: int) -> None:
        """The network moves what was posted, whatever the process that posted it does meanwhile."""
        self._rank(rank).transport.drift(num_pieces)

    def stop(self, rank: int) -> None:
        """Its process stands still."""
        self.ledger.is_calm = False
        self.stopped.add(self._rank(rank).channel.port)

    def resume(self, rank: int) -> None:
        self.stopped.discard(self._rank(rank).channel.port)

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
        sides = ([rank for group in side for rank in group.ranks] for side in (self.prefills, self.decodes))
        prefills, decodes = sides
        channels = (prefills[p % len(prefills)].channel, decodes[d % len(decodes)].channel)
        assert isinstance(channels[0], MemoryChannel)
        assert isinstance(channels[1], MemoryChannel)
        return channels[0], channels[1]

    def crash(self, engine: int) -> None:
        """Its processes are gone, and with them every request it had."""
        victim = self._group(engine)
        if not victim.is_alive:
            return
        victim.crash()
        self.ledger.is_calm = False
        for story in self.stories:
            if self.prefills[story.p] is victim and story.at_prefill != "new":
                story.at_prefill = "released"
            if self.decodes[story.d] is victim and story.at_decode != "new":
                story.at_decode = "over"

    def restart(self, engine: int) -> None:
        """Other processes of the same name, at the same ports."""
        group = self._group(engine)
        if not group.is_alive:
            group.start()
            self.stopped.difference_update(rank.channel.port for rank in group.ranks)

    def _group(self, number: int) -> Group:
        return self.groups[number % len(self.groups)]

    def _rank(self, number: int) -> Engine:
        ranks = self._ranks()
        return ranks[number % len(ranks)]

    def _ranks(self) -> list[Engine]:
        return [rank for group in self.groups for rank in group.ranks]

    # -- time --------------------------------------------------------------------------------------------------------

    def turn(self, rank: int) -> None:
        self._turn(self._rank(rank))

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for rank in self._ranks():
                self._turn(rank)

    def pass_time(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self.world.now_s += TICK_S
            self.run(2)

    def tick_apart(self, rank: int, tenths: int) -> None:
        """Only this rank gets its turn while a little time passes; the others may look silent to it."""
        self.is_faultless = False
        self.world.now_s += tenths / 10
        self._turn(self._rank(rank))

    def _is_awake(self, rank: Engine) -> bool:
        return rank.is_alive and rank.channel.port not in self.stopped

    def _turn(self, rank: Engine) -> None:
        if not self._is_awake(rank):
            return
        num_before = rank.num_reports
        group = next(each for each in self.groups if rank in each.ranks)
        was_received = rank.received.copy()
        rank.turn()
        if rank.num_reports > num_before:
            assert max([*rank.sent.values(), *rank.received.values()]) == 1, f"{rank.name} reported a request twice"
            for story in self.stories:
                if RequestId(story.d_rid) in rank.received.keys() - was_received.keys():
                    self.ledger.check_idle(rank, story.received_blocks)
            self._take_reports(group)
        self._look(group)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _take_reports(self, group: Group) -> None:
        for story in self.stories:
            is_finished = story.at_prefill == "finished" and self.prefills[story.p] is group
            if is_finished and group.has_sent(story.p_rid):
                story.at_prefill = "released"
                self.ledger.give_back(group, story.p_blocks, Claim("source", story.index, story.generation))
            is_waiting = story.at_decode == "waiting" and self.decodes[story.d] is group
            if is_waiting and group.has_failed(story.d_rid):
                for rank in group.ranks:  # as our scheduler side does, told by one of them
                    rank.cancel(story.d_rid)
            if is_waiting and group.has_received(story.d_rid):
                story.at_decode = "over"
                if not group.has_failed(story.d_rid):
                    self.ledger.check_delivered(group, story.received_blocks, story.index, story.generation)
                self.ledger.give_back(group, story.received_blocks, Claim("destination", story.index))
                cached = story.d_blocks[: story.first_token // BLOCK_SIZE]
                self.ledger.give_back(group, cached, Claim("cached", story.index))

    def _look(self, group: Group) -> None:
        """A preempted request gives its blocks up as soon as it may, and begins anew."""
        for story in self.stories:
            is_here = story.at_prefill == "preempting" and self.prefills[story.p] is group
            if is_here and all(each.is_set() for each in story.released):
                self.ledger.give_back(group, story.p_blocks, Claim("source", story.index, story.generation))
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
        is_prompt = self.is_faultless and self.ledger.is_calm and all(each.is_known_to_both for each in self.stories)
        began_s = self.world.now_s
        self._settle()
        assert not is_prompt or self.world.now_s <= began_s + PROMPT_S, f"waited for a clock: {self._unfinished()}"
        if self.stopped:
            self.stopped.clear()
            self.land()
            self._settle()
        self.world.now_s += IDLE_S + 1
        self.run(2)
        for group in self.groups:
            if group.is_alive:
                assert not group.owner, f"{group.name} has blocks left: {group.owner}"
                for rank in group.ranks:
                    self._check(rank)

    def _settle(self) -> None:
        end_s = self.world.now_s + SETTLING_S
        while self.world.now_s < end_s:
            for story in self.stories:
                if self._is_all_awake(self.prefills[story.p]):
                    self.compute(story.index)
                    self.finish(story.index)
            self.pass_time(1)
            awake = [rank for group in self.groups if self._is_all_awake(group) for rank in group.ranks]
            if all(self._is_done(rank) for rank in awake) and self._is_over():
                return
        left = [f"{rank.name}: {rank.num_transfers} transfers" for rank in awake if not self._is_done(rank)]
        raise AssertionError(f"not over within {SETTLING_S:.0f} s: {', '.join(left)}; {self._unfinished()}")

    def _is_all_awake(self, group: Group) -> bool:
        return all(self._is_awake(rank) for rank in group.ranks)

    def _is_done(self, rank: Engine) -> bool:
        return not (rank.num_transfers or rank.is_busy or rank.transport.posted)

    def _is_over(self) -> bool:
        """Of every request: it was reported, unless a process that had to do so stands still."""
        return all(
            (story.at_prefill in {"new", "released"} or not self._is_all_awake(self.prefills[story.p]))
            and (story.at_decode != "waiting" or not self._is_all_awake(self.decodes[story.d]))
            for story in self.stories
        )

    def _unfinished(self) -> list[tuple[str, str, str]]:
        return [(str(story.tid), story.at_prefill, story.at_decode) for story in self.stories]

    def _check(self, rank: Engine) -> None:
        rank.may_change = set(range(NUM_BLOCKS))  # the ledger has seen every byte that moved
        rank.check()
        assert len(rank.rank.peers) == 0, f"{rank.name} still remembers peers"
        assert isinstance(rank.channel, MemoryChannel)
        assert rank.channel.num_lines == 0, f"{rank.name} still has lines"
