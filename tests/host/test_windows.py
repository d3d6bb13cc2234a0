"""Sliding windows: what the decode side will look at is there on both sides when it does.

Found: vLLM frees the window block that only the prompt's last token looked at as soon as that token is computed, on the
prefill side while the block was still to be written from, and on the decode side before that token is computed again.
For one prompt length in every block size, the decode side answered from another request's KV, or from none.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from kvbaton.runtime.events import DestinationOpened, SourceAdvanced
from tests.host.rig import BLOCK_SIZE, Engine, of_type
from tests.host.tickets import PREFILL, PUSH

WINDOW = 2 * BLOCK_SIZE
LENGTHS = pytest.mark.parametrize("num_tokens", range(5 * BLOCK_SIZE, 6 * BLOCK_SIZE + 1))
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def looked_at(blocks: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The window blocks that the prompt's last token, at `num_tokens - 1`, needs others' KV from."""
    return blocks[(num_tokens - WINDOW) // BLOCK_SIZE : -(-(num_tokens - 1) // BLOCK_SIZE)]


@MODES
@LENGTHS
def test_the_decode_side_has_a_place_for_all_that_its_last_token_looks_at(num_tokens: int, is_async: bool) -> None:
    engine = Engine(40, window_tokens=WINDOW, is_async=is_async)
    engine.add("d", num_tokens, PUSH)
    engine.step()
    (command,) = of_type(DestinationOpened, engine.commands)
    assert 0 not in looked_at(command.blocks[1], num_tokens)
    engine.worker.deliver("d")
    engine.step()
    engine.schedule()
    assert looked_at(engine.blocks("d")[1], num_tokens) == looked_at(command.blocks[1], num_tokens)
    engine.land()
    engine.run()
    engine.check_empty()


@MODES
@pytest.mark.parametrize("max_tokens", [1, 12])
@LENGTHS
def test_the_prefill_side_keeps_all_that_the_decode_side_will_look_at(
    num_tokens: int, max_tokens: int, is_async: bool
) -> None:
    engine = Engine(40, window_tokens=WINDOW, is_async=is_async)
    engine.add("p", num_tokens, PREFILL, max_tokens=max_tokens)
    while not engine.worker.held:
        engine.tick()
    last = of_type(SourceAdvanced, engine.commands)[-1]
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert last.is_last
    assert all(pool.blocks[block].ref_cnt > 0 for block in looked_at(last.blocks[1], num_tokens))
    assert 0 not in looked_at(last.blocks[1], num_tokens)
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("is_given_up", [False, True])
@MODES
def test_a_preemption_gives_the_kept_blocks_back(is_given_up: bool, is_async: bool) -> None:
    """Not before the steps in flight, which may still write them, have run; and without waiting for the next request."""
    engine = Engine(40, window_tokens=WINDOW, is_async=is_async)
    engine.add("p", 15, PREFILL, max_tokens=4)
    engine.schedule()
    kept = of_type(SourceAdvanced, engine.commands)[-1].blocks[1]
    if not is_async:
        engine.land()
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0, drop_stale_output=True)
    engine.schedule()
    if is_given_up:
        engine.abort("p")
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block].ref_cnt > 0 for block in kept if block)
    engine.run()
    engine.check_empty()
