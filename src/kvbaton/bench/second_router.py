"""A further router in front of engines that already run, for the other direction.

Invariant: the engines are not touched; a request says itself which way its KV goes, so one pair serves both. The second
router ends with the `with` block, whatever happens. Read `kvbaton.launch.plan` for the first router's command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbaton.launch.diagnose import diagnose
from kvbaton.launch.plan import ProcessPlan
from kvbaton.launch.ports import Ports
from kvbaton.launch.process import Child
from kvbaton.launch.ready import serves
from kvbaton.launch.remedy import deployment_error
from kvbaton.launch.supervisor import Deployment
from kvbaton.types import Direction

_STOP_S = 10.0


@contextlib.contextmanager
def second_router(deployment: Deployment, direction: Direction) -> Iterator[str]:
    """The URL of a router that serves `deployment`'s engines in `direction`. DeploymentError when it dies at start."""
    first = deployment.plan.engines, deployment.router.plan
    port = Ports(avoid=[plan.port for plan in (*first[0], first[1])]).take(first[1].host, 0, what="the second router")
    plan = router_plan(first[1], direction, port)
    child = Child(plan)
    try:
        deployment.attend(lambda: child.exit_code() is not None or serves(plan.connect_host, plan.port))
        if (code := child.exit_code()) is not None:
            found = diagnose(plan.log_path, code)
            raise deployment_error(f"{plan.name} {found.how} before it was ready\n{found.text()}", found.remedy)
        yield plan.url
    finally:
        child.stop(_STOP_S)


def router_plan(first: ProcessPlan, direction: Direction, port: int) -> ProcessPlan:
    """`first` with another direction, port, log and trace."""
    name = f"{first.name}-{direction.value}"
    log_path = Path(first.log_path).with_name(f"{name}.log")
    trace_path = Path(first.trace_path).with_name(f"{name}.jsonl") if first.trace_path else None
    replaced = {"--direction": direction.value, "--port": str(port), "--trace-file": str(trace_path)}
    argv = list(first.argv)
    for flag, value in replaced.items():
        if flag in argv:
            argv[argv.index(flag) + 1] = value
    return msgspec.structs.replace(
        first,
        name=name,
        port=port,
        argv=tuple(argv),
        log_path=str(log_path),
        trace_path=str(trace_path) if trace_path else None,
    )
