# SPDX-License-Identifier: Apache-2.0
"""FLOP counts against the throughputs that HARP's authors printed for their runs."""

import pytest

from hetjax.costs.graph.flops import forward_flops
from hetjax.models.decoders import GPTConfig, gpt_model

GLOBAL_BATCH, SEQ_LEN, VOCAB = 1024, 1024, 51200


# (hidden, blocks, heads, measured seconds, printed TFLOP/s); the third row is per
# device of four, the others are for the whole cluster
@pytest.mark.parametrize(
    ("hidden", "blocks", "heads", "seconds", "printed"),
    [
        (1536, 24, 16, 31.000, 220.26),
        (2048, 24, 32, 47.297, 246.05),
        (2048, 24, 32, 24.246, 4 * 119.99),
        (1024, 24, 16, 39.310, 83.58),
    ],
)
def test_counted_flops_give_the_printed_throughput(
    hidden: int, blocks: int, heads: int, seconds: float, printed: float
):
    config = GPTConfig(
        name="gpt",
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_blocks=blocks,
        num_heads=heads,
        max_seq_len=SEQ_LEN,
    )
    *rest, head = forward_flops(gpt_model(config), SEQ_LEN)
    # their runs recompute the blocks: four passes of these, three of the head
    step_flops = GLOBAL_BATCH * (4 * sum(rest) + 3 * head)
    assert step_flops / seconds / 1e12 == pytest.approx(printed, rel=2e-4)
    s, h = SEQ_LEN, hidden
    formula = 96 * GLOBAL_BATCH * s * h**2 * blocks * (1 + s / (6 * h))
    assert step_flops == pytest.approx(formula + 6 * GLOBAL_BATCH * s * h * VOCAB)
