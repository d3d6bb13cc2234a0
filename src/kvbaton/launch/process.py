"""One child of the supervisor: an engine or the router, in its own session, on a leash, with its output in a file.

Invariant: after `stop` or `kill` returns, nothing the command started is left. Read `leash` for the process in between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvbaton.launch.identity import Identity, descendants, session_members, wait_gone
from kvbaton.launch.plan import ProcessPlan

_KILL_WAIT_S = 5.0
_REPLACED = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
"""Inherited variables that would contradict the plan where it leaves them out."""


class Child:
    """A started process and its leash."""

    def __init__(self, plan: ProcessPlan, *, append_log: bool = False, python: str = sys.executable) -> None:
        """Start it. Returns at once; readiness is somebody else's question."""
        self.plan = plan
        self.started_s = time.monotonic()
        self._identity: Identity | None = None
        lifeline, self._lifeline_end = os.pipe()
        self._report, report_end = os.pipe()
        leash = [
            python,
            "-P",
            "-m",
            "kvbaton.launch.leash",
            "--lifeline-fd",
            str(lifeline),
            "--report-fd",
            str(report_end),
        ]
        Path(plan.log_path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with Path(plan.log_path).open("ab" if append_log else "wb") as log:
                self._leash = subprocess.Popen(  # noqa: S603 - the command is the plan
                    [*leash, "--", *plan.argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(plan),
                    pass_fds=(lifeline, report_end),
                    start_new_session=True,
                )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(lifeline)
            os.close(report_end)
        self.leash = Identity.of(self._leash.pid)

    @property
    def identity(self) -> Identity | None:
        """The command's own process; None when it is gone."""
        if self._identity is None and self._report >= 0:
            # The leash writes one line when it has started the command, or closes the pipe by dying.
            line = os.read(self._report, 32)
            os.close(self._report)
            self._report = -1
            if line.strip().isdigit():
                self._identity = Identity.of(int(line))
        return self._identity

    @property
    def pid(self) -> int:
        """The command's process id; the leash's own where the command could not be started."""
        identity = self.identity
        return identity.pid if identity else self._leash.pid

    def exit_code(self) -> int | None:
        """None while it runs; 128 + n when signal n ended it."""
        code = self._leash.poll()
        if code is None:
            return None
        self._close_pipes()
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Ask it to end; `stop` waits."""
        if self._leash.poll() is None:
            self._leash.terminate()

    def stop(self, timeout_s: float) -> None:
        """It has ended, by itself within `timeout_s` of being asked or killed after."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._leash.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """It and everything below it is gone, without a chance to clean up."""
        below = descendants(self._leash.pid)
        if self._leash.poll() is None:
            # Only the command: the leash then ends what it left behind, also what was started meanwhile.
            if self.identity is not None:
                self.identity.send(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leash.wait(_KILL_WAIT_S)
        if self._leash.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._leash.pid, signal.SIGKILL)
            self._leash.wait()
        # Should the leash itself have been killed, nobody else looks after these.
        left = below + (session_members(self.leash) if self.leash else [])
        for process in left:
            process.send(signal.SIGKILL)
        wait_gone(left, _KILL_WAIT_S)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for fd in (self._report, self._lifeline_end):
            if fd >= 0:
                os.close(fd)
        self._report = self._lifeline_end = -1


def _environment(plan: ProcessPlan) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if plan.role == "router" or key not in _REPLACED}
    return inherited | plan.env
