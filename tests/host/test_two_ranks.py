"""vLLM's sum of what two ranks report, and its scheduler: a load that failed on one rank does not wait for the other."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvbaton.connector.handover import FailedLoads
from kvbaton.runtime.events import DestinationCancelled
from kvbaton.types import RequestId
from tests.host.rig import Engine, of_type
from tests.host.tickets import PUSH

D = RequestId("d")


def reported(*names: str) -> KVConnectorOutput:
    """By one rank, as our worker does: the loads that ended there, all of them badly."""
    meta = FailedLoads(frozenset(RequestId(name) for name in names)) if names else None
    return KVConnectorOutput(
        finished_recving=set(names) or None, failed_recving=set(names), kv_connector_worker_meta=meta
    )


def summed(aggregator: KVOutputAggregator, *ranks: KVConnectorOutput) -> KVConnectorOutput:
    outputs: list[ModelRunnerOutput | None] = [
        ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=rank) for rank in ranks
    ]
    total = aggregator.aggregate(outputs)
    assert total is not None
    assert total.kv_connector_output is not None
    return total.kv_connector_output


@pytest.mark.parametrize("failing", [0, 1])
def test_the_other_rank_is_told_to_stop_and_the_request_fails_once(failing: int) -> None:
    engine, aggregator = Engine(), KVOutputAggregator(2)
    engine.add("d", 10, PUSH, max_tokens=3)
    engine.step()
    ranks = [reported(), reported()]
    ranks[failing] = reported("d")
    engine.worker.news = summed(aggregator, *ranks)
    engine.step()
    assert not engine.outputs
    assert of_type(DestinationCancelled, engine.step().before_forward) == [DestinationCancelled(D)]
    engine.run()  # the hand-made worker is the other rank, and has done as it was told
    assert [str(each.finish_reason) for each in engine.outputs] == ["error"]
    engine.check_empty()


def test_two_ranks_that_fail_together_fail_the_request_once() -> None:
    engine, aggregator = Engine(), KVOutputAggregator(2)
    engine.add("d", 10, PUSH, max_tokens=3)
    engine.step()
    engine.worker.loading.pop(D)
    engine.worker.news = summed(aggregator, reported("d"), reported("d"))
    engine.run()
    assert [str(each.finish_reason) for each in engine.outputs] == ["error"]
    engine.check_empty()
