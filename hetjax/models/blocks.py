# SPDX-License-Identifier: Apache-2.0
"""From module specs to layers: how finely a stack of blocks is cut.

Owns the order, the paths and the grain of a decoder's layers. Does not own what is in
a block (`gpt.py`, `llama.py`).
"""

from collections.abc import Hashable
from typing import Literal

from hetjax.models.model import Layer, ModuleSpec

Grain = Literal["block", "half"]
Half = tuple[str, type, Hashable]  # name within the block, class, config


def decoder_layers(
    *,
    embedding: ModuleSpec,
    halves: tuple[Half, Half],
    num_blocks: int,
    head: ModuleSpec,
    grain: Grain,
) -> tuple[Layer, ...]:
    """Lay out embedding, equal blocks and head; module paths do not depend on grain."""
    blocks = [
        layer for index in range(num_blocks) for layer in _block(index, halves, grain)
    ]
    ends = Layer("embedding", (embedding,)), Layer("head", (head,))
    return ends[0], *blocks, ends[1]


def _block(index: int, halves: tuple[Half, Half], grain: Grain) -> list[Layer]:
    block = f"block_{index:03d}"
    specs = [ModuleSpec(f"{block}.{name}", cls, config) for name, cls, config in halves]
    if grain == "half":
        return [Layer(spec.path, (spec,)) for spec in specs]
    return [Layer(block, tuple(specs))]
