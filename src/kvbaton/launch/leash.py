"""Runs one command so that nothing of it outlives the launcher: `python -m kvbaton.launch.leash [options] -- command`.

Stands between the supervisor and an engine as a process of its own. It is the subreaper of everything the command
starts, so workers whose parent died are still found; it holds one end of a pipe whose other end only the launcher has,
so it learns of the launcher's death, `kill -9` included, from the kernel. When the command ends or the launcher is
gone, all descendants go.

Invariant: this process exits only when no descendant is left. Standard library only, no threads (it forks).
Read `process` next for the other end of the pipes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALLED = 128
"""Exit codes above it mean "ended by that signal", as in a shell."""
_LAST_WORDS_S = 0.5


def main(argv: list[str] | None = None) -> int:
    """Run the command; the result is its exit code, or 128 + the signal that ended it."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.cores:
        os.sched_setaffinity(0, _cores(options.cores))
    if options.lifeline_fd is None:
        os.execvp(options.command[0], options.command)  # noqa: S606 - only the pinning was wanted
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for fd in (options.lifeline_fd, options.report_fd):
        os.set_inheritable(fd, False)  # the command must not keep our pipes open
    child = _start(options.command)
    os.write(options.report_fd, f"{child}\n".encode())
    os.close(options.report_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: _send(child, received))
    status = _watch(child, options.lifeline_fd, options.grace_s)
    _end_descendants(os.getpid())
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else _SIGNALLED + os.WTERMSIG(status)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvbaton.launch.leash", description="Run a command on a leash.")
    parser.add_argument("--cores", help="run on these cores, such as 0-3,6")
    parser.add_argument("--lifeline-fd", type=int, help="end when the other end of this pipe is closed")
    parser.add_argument("--report-fd", type=int, help="write the command's pid here")
    parser.add_argument("--grace-s", type=float, default=5.0, help="time to end by itself when the launcher is gone")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def _cores(text: str) -> set[int]:
    runs = [run.partition("-") for run in text.split(",")]
    return {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}


def _start(command: list[str]) -> int:
    """The command as a child that the kernel kills should this process be killed."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(_SIGNALLED + signal.SIGKILL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _watch(child: int, lifeline: int, grace_s: float) -> int:
    """The child's wait status, once it has ended by itself or because the launcher is gone."""
    child_fd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(child_fd, select.POLLIN)
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if child_fd in ready:
            break
        if lifeline in ready:
            poll.unregister(lifeline)
            _send(child, signal.SIGTERM)
            if not poll.poll(int(grace_s * 1000)):
                _send(child, signal.SIGKILL)
    os.close(child_fd)
    return os.waitpid(child, 0)[1]


def _end_descendants(root: int) -> None:
    """No descendant of `root` is left: they may finish their last words, then they are killed."""
    kill_from_s = time.monotonic() + _LAST_WORDS_S
    while True:
        _reap()
        left = _descendants(root)
        if not left:
            return
        if time.monotonic() > kill_from_s:
            for pid in left:
                _send(pid, signal.SIGKILL)
        time.sleep(0.01)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command name, in parentheses, may hold anything; after its last one come state and parent.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main())
