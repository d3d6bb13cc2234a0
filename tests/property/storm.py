"""Seeded schedules on a stage: generated, replayed, and cut down to the shortest that still fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.property.stage import CASTS, FATES, Stage

Step = tuple[str, tuple[int, ...]]
MAX_STEPS = 24


@dataclass(frozen=True)
class Schedule:
    cast: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"stage = Stage({self.cast})"]
        lines += [f"stage.{name}({', '.join(map(str, numbers))})" for name, numbers in self.steps]
        return "\n".join([*lines, "stage.end()"])


Draw = Callable[[Random], tuple[int, ...]]


def number(below: int) -> Draw:
    return lambda chance: (chance.randrange(below),)


def pair(chance: Random) -> tuple[int, ...]:
    return chance.randrange(2), chance.randrange(2)


def story(chance: Random) -> tuple[int, ...]:
    return (
        chance.randrange(2),
        chance.randrange(2),
        chance.randrange(2),
        chance.choice((4, 6, 14)),
        chance.choice((0, 0, 1, 2)),
    )


def nothing(_chance: Random) -> tuple[int, ...]:
    return ()


RULES: tuple[tuple[str, Draw, int], ...] = (
    # (step, its numbers, weight)
    ("begin", story, 4),
    ("open", number(5), 6),
    ("compute", number(5), 12),
    ("finish", number(5), 6),
    ("abort", number(5), 2),
    ("preempt", number(5), 3),
    ("want", number(5), 8),
    ("cancel", number(5), 5),
    ("spurn", number(5), 1),
    ("fate", number(len(FATES)), 8),
    ("message", lambda chance: (chance.choice((0, 2, 2)),), 2),
    ("slow_link", number(6), 1),
    ("land", nothing, 3),
    ("drift", lambda chance: (chance.randrange(4), chance.randint(1, 3)), 3),
    ("stop", number(4), 2),
    ("resume", number(4), 3),
    ("cut", pair, 1),
    ("heal", nothing, 1),
    ("break_line", pair, 1),
    ("crash", number(3), 1),
    ("restart", number(3), 2),
    ("turn", number(4), 16),
    ("run", lambda chance: (chance.randint(1, 3),), 12),
    ("pass_time", lambda chance: (chance.randint(1, 6),), 5),
    ("tick_apart", lambda chance: (chance.randrange(4), chance.randint(1, 40)), 6),
)
_NAMES = [name for name, _, _ in RULES]
_WEIGHTS = [weight for _, _, weight in RULES]
_DRAWS = {name: draw for name, draw, _ in RULES}
_OPENINGS = (("open", "compute", "want", "run", "compute"), ("want", "open", "run", "compute", "finish"))


def generate(seed: int) -> Schedule:
    chance = Random(seed)
    steps: list[Step] = []
    for index in range(chance.choice((1, 2, 2, 3))):
        steps.append(("begin", story(chance)))
        steps += [("fate", (chance.randrange(len(FATES)),)) for _ in range(chance.choice((0, 0, 1, 2)))]
        opening = chance.choice(_OPENINGS)
        for name in opening[: chance.randint(0, len(opening))]:
            steps.append((name, (2,) if name == "run" else (index,)))
    for _ in range(chance.randint(0, MAX_STEPS)):
        name = chance.choices(_NAMES, _WEIGHTS)[0]
        steps.append((name, _DRAWS[name](chance)))
    return Schedule(chance.randrange(len(CASTS)), tuple(steps))


def play(schedule: Schedule) -> None:
    stage = Stage(schedule.cast)
    for name, numbers in schedule.steps:
        getattr(stage, name)(*numbers)
    stage.end()


def failure(schedule: Schedule) -> Exception | None:
    try:
        play(schedule)
    except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
        return error
    return None


def shortest(schedule: Schedule) -> Schedule:
    """The schedule without every step that the failure does not need. It may fail in another way by then."""
    width = max(1, len(schedule.steps) // 2)
    while width:
        start = 0
        while start < len(schedule.steps):
            without = Schedule(schedule.cast, schedule.steps[:start] + schedule.steps[start + width :])
            if failure(without) is None:
                start += width
            else:
                schedule = without
        width //= 2
    return schedule
