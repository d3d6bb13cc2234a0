"""`kv_load_failure_policy: recompute`: KV that does not come is computed by the decode engine, to the same tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from kvbaton.bench.soak_judge import Heard, Verdict, judge
from kvbaton.launch.supervisor import Instance
from tests.engines.asking import ask
from tests.engines.conftest import Pair, wait_until_empty
from tests.faults.asking import Expected, listen
from tests.faults.conftest import LONG, LONG_TOKENS, assert_twenty_succeed, revive, start_pair
from tests.faults.watching import Watch

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def recomputing_pair(right: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with start_pair("recompute", tmp_path_factory.mktemp("faults"), kv_load_failure_policy="recompute") as started:
        yield started


def identity_of(prefill: Instance) -> dict[str, object]:
    answer = ask(prefill.url, (7, 8, 9), max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params: dict[str, object] = json.loads(answer.body)["kv_transfer_params"]
    return {key: params[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")}


def test_a_killed_prefill_engine_costs_time_and_no_token(recomputing_pair: Pair, right: Expected) -> None:
    """The decode leg alone, as a router sends it that does not end it with the prefill leg."""
    pair, prompt = recomputing_pair, LONG[0]
    transfer = {"transfer_id": "recompute-1"}
    ticket = identity_of(pair.prefill) | transfer | {"do_remote_prefill": True, "do_remote_decode": False}
    watch = Watch(pair.prefill)
    heard: list[Heard] = []
    legs = [
        threading.Thread(
            target=lambda: listen(pair.prefill.url, prompt, 1, kv_transfer_params=transfer | {"do_remote_decode": True})
        ),
        threading.Thread(
            target=lambda: heard.append(listen(pair.decode.url, prompt, LONG_TOKENS, kv_transfer_params=ticket))
        ),
    ]
    for leg in legs:
        leg.start()
    watch.wait_for("segment_moved")
    pair.deployment.kill(pair.prefill)
    for leg in legs:
        leg.join()

    assert judge(heard[0], right[prompt]) is Verdict.RIGHT, heard[0]
    revive(pair, pair.prefill)
    assert_twenty_succeed(pair, right)
    wait_until_empty(pair, timeout_s=60)
