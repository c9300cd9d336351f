# SPDX-License-Identifier: Apache-2.0
"""Experts that drop no token: their products, in closed form, and their cuts."""

import math

import pytest

from hetjax.costs.graph.flops import forward_flops
from hetjax.costs.graph.joins import RAGGED
from hetjax.costs.graph.passes import Shares, passes
from hetjax.costs.layer_bytes import layer_stacks
from hetjax.models.configs import LlamaConfig, Routing
from hetjax.models.decoders import model_of

LENGTH, WIDTH, INNER, EXPERTS = 64, 32, 48, 8


def model(top_k: int):
    routing = Routing(num_experts=EXPERTS, top_k=top_k, capacity_factor=None)
    return model_of(
        LlamaConfig(
            name="experts",
            vocab_size=128,
            hidden_size=WIDTH,
            inner_size=INNER,
            num_blocks=1,
            num_heads=4,
            num_kv_heads=4,
            max_seq_len=LENGTH,
            routing=routing,
        )
    )


def shares(tensor: int) -> Shares:
    return Shares(
        num_sequences=2,
        seq_len=LENGTH,
        hidden_size=WIDTH,
        dtype="float32",
        tensor=tensor,
    )


def test_each_choice_of_a_token_is_three_products_of_an_expert():
    one, two = (forward_flops(model(k), LENGTH)[1] for k in (1, 2))
    assert two - one == 3 * 2 * LENGTH * WIDTH * INNER


@pytest.mark.parametrize("tensor", [1, 2])
def test_devices_share_the_inner_width_of_all_experts(tensor: int):
    traced = passes(layer_stacks(model(2), 1), shares(tensor), "none")
    steps = [step for step in traced.forward.steps if step.op == RAGGED]
    gate, up, down = (traced.cuts.shape(step.outputs[0]) for step in steps)
    rows = 2 * LENGTH * 2
    assert gate == up == (rows, INNER // tensor)
    assert down == (rows, WIDTH)
    backward = [step for step in traced.backward.steps if step.op == RAGGED]
    weights = [s for s in backward if len(traced.cuts.shape(s.outputs[0])) == 3]
    assert len(backward) == 6 and len(weights) == 3
    for step in weights:
        size = math.prod(traced.cuts.shape(step.outputs[0]))
        assert size == EXPERTS * WIDTH * INNER // tensor
