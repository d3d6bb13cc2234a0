"""Whatever the engine's steps, every wanted token is sent exactly once, in whole blocks, with one last segment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.protocol.segments import Segment, Segments

steps = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(
    st.lists(steps, min_size=1, max_size=4),
    st.integers(0, 12),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((1, 2)),
    st.data(),
)
def test_every_wanted_token_is_in_exactly_one_segment_of_the_newest_generation(
    generations: list[list[int]], first_block: int, block_size: int, ratio: int, data: st.DataObject
) -> None:
    num_tokens = sum(generations[-1])
    first_token = first_block * block_size
    segments = Segments(first_token, block_size * ratio)
    taken: list[Segment] = []
    for generation, chunks in enumerate(generations):
        num_final = 0
        for index, chunk in enumerate(chunks):
            is_final = generation == len(generations) - 1 and index == len(chunks) - 1
            num_final += chunk
            for _ in range(data.draw(st.integers(1, 2))):  # being told twice changes nothing
                segments.advance(num_final, is_final=is_final, generation=generation)
            if is_final or data.draw(st.booleans()):
                while (segment := segments.take()) is not None:
                    taken.append(segment)
                    if data.draw(st.booleans()):
                        segments.confirm(segment)
            segments.advance(10_000, is_final=True, generation=generation - 1)  # a straggler of the one before

    newest = [segment for segment in taken if segment.generation == len(generations) - 1]
    tokens = [token for segment in newest for token in range(segment.first_token, segment.end_token)]
    assert tokens == list(range(first_token, max(first_token, num_tokens)))
    assert [segment.number for segment in newest] == list(range(len(newest)))
    assert [segment.is_last for segment in newest] == [False] * (len(newest) - 1) + [True]
    _assert_blocks_are_sent_once(newest, first_token, num_tokens, block_size)


def _assert_blocks_are_sent_once(newest: list[Segment], first_token: int, num_tokens: int, block_size: int) -> None:
    """Every segment but the last ends on a block boundary, so no block is in two of them."""
    blocks = [
        block for each in newest for block in range(each.first_token // block_size, -(-each.end_token // block_size))
    ]
    assert blocks == list(range(first_token // block_size, -(-max(first_token, num_tokens) // block_size)))
