"""The pages that say what the code says are current."""

from __future__ import annotations

import subprocess
import sys

from kvbaton.protocol.rendezvous import TRANSITIONS
from kvbaton.runtime.metrics import METRICS
from tests.architecture.test_budgets_and_names import ROOT


def test_the_committed_pages_are_what_the_script_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "pages"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_transition_and_every_metric_is_on_its_page() -> None:
    protocol = (ROOT / "docs" / "protocol.md").read_text()
    for (state, what), (target, _, _) in TRANSITIONS.items():
        if target is not None:
            assert f"| {state.value} | {what.value} | {target.value} |" in protocol
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert not [metric.suffix for metric in METRICS if f"| `{metric.shown_name}` | {metric.kind.value} |" not in page]
