"""The ranks of one engine, as a world's engines: each with its heads and layers of the same KV cache."""

from __future__ import annotations

import msgspec

from kvbaton.geometry.layout import Region, plain
from tests.runtime.world import BLOCK_BYTES, BLOCK_SIZE, LAYERS, NUM_BLOCKS, Engine, World


def ranks(
    world: World, name: str, *, port: int, tp: int = 1, pp: int = 1, total_heads: int = 2, incarnation: str = ""
) -> list[Engine]:
    """One engine's ranks. A block has room for two heads; a rank that owns one uses the first half of it."""
    made = []
    for number in range(tp * pp):
        stage, tp_rank = divmod(number, tp)
        life = f"{incarnation} {number}" if incarnation else ""
        engine = world.engine(name, rank=number, port=port + number, incarnation=life)
        layout = engine.rank.hello.layout
        num_heads = max(1, total_heads // tp)
        head_bytes = BLOCK_BYTES // max(1, total_heads)
        regions = [
            Region(
                layer=region.layer,
                cache_group=0,
                base_address=region.base_address,
                num_rows=NUM_BLOCKS,
                row_stride_bytes=BLOCK_BYTES,
                row_tokens=BLOCK_SIZE,
                num_heads=num_heads,
                total_heads=total_heads,
                head_stride_bytes=head_bytes,
                parts=plain(head_bytes // BLOCK_SIZE, head_bytes // BLOCK_SIZE),
            )
            for index, region in enumerate(layout.regions)
            if index * pp // len(LAYERS) == stage
        ]
        engine.use_layout(
            msgspec.structs.replace(
                layout,
                regions=tuple(regions),
                num_kv_heads=total_heads,
                tp_size=tp,
                tp_rank=tp_rank,
                pp_size=pp,
                pp_rank=stage,
            )
        )
        made.append(engine)
    return made
