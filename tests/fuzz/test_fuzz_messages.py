"""The fuzzing harness itself, without the fuzzer: its seeds reach what they are meant to, and it can find something."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvbaton.runtime.destination import DestinationEnd
from kvbaton.runtime.source import SourceEnd
from tests.fuzz import fuzz_messages
from tests.fuzz.fuzz_messages import Fuzzing, Target, mutate_fields, seeds, write_seeds


def feed(fuzzing: Fuzzing) -> None:
    for seed in seeds():
        fuzzing.one(seed)


def test_every_seed_is_heard_and_leaves_nothing() -> None:
    target = Target()
    for seed in seeds():
        target.hear(seed)
    target.end()
    assert target.num_heard == len(seeds())


def test_the_seeds_get_past_the_first_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set[str]()
    for end, names in ((SourceEnd, ("_registered", "_cancelled", "_ended")), (DestinationEnd, ("_offered", "_ended"))):
        for name in names:
            original = getattr(end, name)

            def note(*args: object, original: object = original, name: str = f"{end.__name__}.{name}") -> object:
                reached.add(name)
                return original(*args)  # type: ignore[operator]

            monkeypatch.setattr(end, name, note)
    target = Target()
    for seed in seeds():
        target.hear(seed)
    assert reached >= {
        "SourceEnd._registered",
        "SourceEnd._cancelled",
        "SourceEnd._ended",
        "DestinationEnd._offered",
        "DestinationEnd._ended",
    }


def test_a_message_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(SourceEnd, "_cancelled", fail)
    with pytest.raises(ZeroDivisionError):
        feed(Fuzzing())


def test_a_transfer_that_a_stranger_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_all(self: SourceEnd, *_: object) -> None:
        self._transfers.clear()

    monkeypatch.setattr(SourceEnd, "_cancelled", end_all)
    monkeypatch.setattr(fuzz_messages, "MESSAGES_PER_WORLD", len(seeds()))
    with pytest.raises((AssertionError, KeyError)):  # the harness misses it, or whoever counts its waits does
        feed(Fuzzing())


def test_the_mutator_changes_fields_and_leaves_noise_alone() -> None:
    rng = random.Random(1)
    changed = [mutate_fields(seed, rng) for seed in seeds() for _ in range(20)]
    known = [each for each in changed if each is not None]
    assert len(known) > len(changed) / 2
    assert len(set(known)) > len(known) / 4
    assert mutate_fields(b"\x00\xc1", rng) is None


def test_seeds_are_files_that_the_fuzzer_reads(tmp_path: Path) -> None:
    write_seeds(tmp_path / "corpus")
    found = [each.read_bytes() for each in (tmp_path / "corpus").iterdir()]
    assert len(found) == len(seeds())
    assert {each[0] for each in found} == {0, 1, 2, 3}
    Fuzzing().one(b"")
