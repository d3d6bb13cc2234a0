"""The results of a soak: every attempt, what it adds up to, and a page for people.

Invariant: pure; the page and the exit code are computed from the attempts in the results file, so that anybody can check
them. Read `soak_judge` for the verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvbaton.bench.metrics import percentile
from kvbaton.bench.records import Environment
from kvbaton.bench.soak_judge import Verdict
from kvbaton.bench.text import markdown_table

_SHOWN_BAD = 20


class Attempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client's one request. Times count from the start of the load."""

    request: int
    direction: str
    is_streaming: bool
    sent_s: float
    ended_s: float
    verdict: Verdict
    status: int | None
    num_tokens: int
    reason: str | None = None
    message: str | None = None
    tokens: tuple[int, ...] | None = None
    """Only the wrong ones are kept."""


class KillRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that ended, by us or by itself, and was started again on the same port."""

    engine: str
    is_ours: bool
    """Killed by the soak; otherwise it died of something else."""
    after_requests: int
    killed_s: float
    served_s: float
    """It answered its own health check again."""


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's blocks after the last request."""

    engine: str
    usage: float
    """The share of its blocks that is still held: 0 when none is missing."""
    empty_after_s: float | None
    """From the end of the last request; None: not within the time that was waited."""
    is_cache_reset: bool
    """vLLM emptied its prefix cache, which it refuses while any block is held by anybody."""
    num_preemptions: float = 0.0


class SoakReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole results file."""

    schema_version: Literal[1] = 1
    kind: Literal["soak"] = "soak"
    mode: str
    title: str
    model: str
    settings: dict[str, str | int | float]
    environment: Environment
    took_s: float
    stopped: str | None = None
    """Why it ended before its last request."""
    attempts: tuple[Attempt, ...]
    kills: tuple[KillRecord, ...]
    pools: tuple[PoolRecord, ...]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def count(self, verdict: Verdict) -> int:
        return sum(attempt.verdict is verdict for attempt in self.attempts)

    @property
    def num_requests(self) -> int:
        return len({attempt.request for attempt in self.attempts})

    @property
    def unanswered(self) -> tuple[int, ...]:
        """Requests that were neither answered nor left by their client."""
        final = {attempt.request: attempt.verdict for attempt in self.attempts}
        return tuple(
            sorted(number for number, verdict in final.items() if verdict not in (Verdict.RIGHT, Verdict.LEFT))
        )

    @property
    def complaints(self) -> tuple[str, ...]:
        """Every promise that was not kept; none is a soak passed."""
        kinds = {
            Verdict.HUNG: "hung",
            Verdict.WRONG: "with wrong tokens",
            Verdict.DISHONEST: "with a dishonest failure",
        }
        found = [f"{count} attempts {words}" for kind, words in kinds.items() if (count := self.count(kind))]
        if self.unanswered and self.stopped is None:
            found.append(f"{len(self.unanswered)} requests never answered")
        found += [f"{each.engine} died by itself" for each in self.kills if not each.is_ours]
        for pool in self.pools:
            if pool.empty_after_s is None:
                found.append(f"{pool.engine} holds {pool.usage:.2%} of its blocks")
            elif not pool.is_cache_reset:
                found.append(f"{pool.engine} cannot reset its prefix cache")
        return tuple(found)

    def recovery_s(self, kill: KillRecord) -> float | None:
        """From the death to the end of the first right answer to a request that was sent after it."""
        ends = [
            attempt.ended_s
            for attempt in self.attempts
            if attempt.verdict is Verdict.RIGHT and attempt.sent_s > kill.killed_s and attempt.ended_s >= kill.served_s
        ]
        return min(ends) - kill.killed_s if ends else None

    def summary(self) -> str:
        """The page."""
        verdict = "; ".join(self.complaints) or "every promise kept"
        if self.stopped:
            verdict = f"{self.stopped}; until then {verdict}"
        parts = [f"# kvbaton bench soak: {self.title}", f"**{verdict}**"]
        parts.append("\n".join(self._facts()))
        parts.append("## Attempts\n\n" + markdown_table(self._verdict_rows()))
        failures = self._failure_rows()
        if len(failures) > 1:
            parts.append("## Failures\n\n" + markdown_table(failures))
        if self.kills:
            parts.append("## Engines that were killed\n\n" + markdown_table(self._kill_rows()))
        parts.append("## Blocks after the last request\n\n" + markdown_table(self._pool_rows()))
        bad = [each for each in self.attempts if each.verdict in (Verdict.WRONG, Verdict.HUNG, Verdict.DISHONEST)]
        if bad:
            parts.append("## What must not be\n\n" + "\n".join(_bad_line(each) for each in bad[:_SHOWN_BAD]))
        return "\n\n".join(parts) + "\n"

    def _facts(self) -> list[str]:
        where = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return [
            f"* command: `{where.command}`",
            f"* {where.date}, {where.machine}, load before {where.load_at_start}; {versions}",
            f"* {settings}",
            (
                f"* {self.num_requests} requests, {self.num_failed_requests} of them told to come again at least once; "
                f"{len(self.attempts)} attempts in {self.took_s:.0f} s"
            ),
        ]

    @property
    def num_failed_requests(self) -> int:
        """Requests of which at least one attempt was told to come again."""
        return len({attempt.request for attempt in self.attempts if attempt.verdict is Verdict.FAILED})

    def _verdict_rows(self) -> list[list[str]]:
        rows = [["verdict", "attempts", "median s", "p99 s", "longest s"]]
        for verdict in Verdict:
            times = sorted(each.ended_s - each.sent_s for each in self.attempts if each.verdict is verdict)
            figures = [f"{percentile(times, share):.2f}" for share in (50, 99, 100)] if times else ["", "", ""]
            rows.append([verdict.value, str(len(times)), *figures])
        return rows

    def _failure_rows(self) -> list[list[str]]:
        failed = [each for each in self.attempts if each.verdict not in (Verdict.RIGHT, Verdict.WRONG, Verdict.LEFT)]
        kinds = Counter(
            (str(each.status or "none"), each.reason or "", each.verdict.value, each.num_tokens > 0) for each in failed
        )
        rows = [["status", "class", "verdict", "where", "attempts"]]
        for (status, why, verdict, has_begun), count in kinds.most_common():
            rows.append(
                [status, why, verdict, "within the answer" if has_begun else "instead of an answer", str(count)]
            )
        return rows

    def _kill_rows(self) -> list[list[str]]:
        rows = [["engine", "by", "after requests", "served again after", "first right answer after"]]
        for kill in self.kills:
            recovery_s = self.recovery_s(kill)
            rows.append(
                [
                    kill.engine,
                    "us" if kill.is_ours else "itself",
                    str(kill.after_requests),
                    f"{kill.served_s - kill.killed_s:.1f} s",
                    "never" if recovery_s is None else f"{recovery_s:.1f} s",
                ]
            )
        return rows

    def _pool_rows(self) -> list[list[str]]:
        rows = [["engine", "held", "empty after", "prefix cache reset", "preemptions"]]
        for pool in self.pools:
            after = "never" if pool.empty_after_s is None else f"{pool.empty_after_s:.1f} s"
            reset = "yes" if pool.is_cache_reset else "refused"
            rows.append([pool.engine, f"{pool.usage:.2%}", after, reset, f"{pool.num_preemptions:.0f}"])
        return rows


def _bad_line(attempt: Attempt) -> str:
    how = "stream" if attempt.is_streaming else "whole"
    said = f": {attempt.message}" if attempt.message else ""
    return (
        f"* request {attempt.request}, {attempt.direction}, {how}, sent at {attempt.sent_s:.1f} s, ended after "
        f"{attempt.ended_s - attempt.sent_s:.1f} s: {attempt.verdict.value}, status {attempt.status}, "
        f"{attempt.num_tokens} tokens, {attempt.reason or 'other tokens'}{said}"
    )


def counts_line(attempts: Sequence[Attempt]) -> str:
    """What has happened so far, without what has not."""
    counts = Counter(attempt.verdict for attempt in attempts)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
