# SPDX-License-Identifier: Apache-2.0
"""Facts of layers add up to stages, and are what the formulas of the field say."""

import pytest

from hetjax.costs.layers import LayerFacts, layer_facts
from hetjax.costs.memory import stage_memory
from hetjax.costs.passes import Shares
from hetjax.costs.static import adam_state
from hetjax.models.counts import forward_flops
from hetjax.plans.plan import Remat, StageMesh
from tests.costs.small_models import SEQ_LEN, WIDTH, family, pipeline

NUM_SEQUENCES = 2
ACTIVATION = NUM_SEQUENCES * SEQ_LEN * WIDTH * 4


def facts(name: str, layer: int, tensor: int = 1, remat: Remat = "none") -> LayerFacts:
    shares = Shares(
        num_sequences=NUM_SEQUENCES,
        seq_len=SEQ_LEN,
        hidden_size=WIDTH,
        dtype="float32",
        tensor=tensor,
    )
    return layer_facts(family(name), layer, shares, remat, data=1, optimizer=adam_state)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_residuals_of_a_run_are_its_layers_and_a_constant(name: str, remat: Remat):
    model, layer = family(name), facts(name, 1, remat=remat)
    plan = pipeline(
        model,
        (0, 1),
        (1, 5),
        (5, 6),
        mesh=StageMesh(),
        remat=remat,
        microbatch_size=NUM_SEQUENCES,
    )
    memory = stage_memory(plan, model, (0, 1))
    residuals = memory.saved_bytes - memory.input_bytes
    assert residuals == layer.run_saved_bytes + 4 * layer.saved_bytes


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_arithmetic_is_that_of_the_model_and_a_backward_is_twice_a_forward(name: str):
    block = facts(name, 2)
    model_flops = NUM_SEQUENCES * forward_flops(family(name), SEQ_LEN)[2]
    assert block.forward_flops == model_flops
    assert block.backward_flops == 2 * block.forward_flops


def test_full_remat_repeats_the_forward_but_not_its_last_product():
    kept, repeated = facts("gpt", 2), facts("gpt", 2, remat="full")
    last_product = 2 * NUM_SEQUENCES * SEQ_LEN * 4 * WIDTH * WIDTH
    more = repeated.backward_flops - kept.backward_flops
    assert more == kept.forward_flops - last_product


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_tensor_parallel_blocks_reduce_two_activations_each_way(name: str):
    block = facts(name, 2, tensor=2)
    assert block.forward_all_reduce_bytes == 2 * ACTIVATION
    assert block.backward_all_reduce_bytes == 2 * ACTIVATION


def test_the_ends_reduce_an_activation_and_the_sums_of_the_softmax():
    embedding, head = facts("llama", 0, tensor=2), facts("llama", 5, tensor=2)
    assert embedding.forward_all_reduce_bytes == ACTIVATION
    assert embedding.backward_all_reduce_bytes == 0
    per_token = NUM_SEQUENCES * SEQ_LEN * 4
    assert head.forward_all_reduce_bytes == 3 * per_token  # maximum, sum, target
    assert head.backward_all_reduce_bytes == ACTIVATION


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_tensor_parallelism_halves_the_arithmetic(layer: int):
    whole, half = facts("llama", layer), facts("llama", layer, tensor=2)
    assert half.forward_flops * 2 == whole.forward_flops
    assert half.backward_flops * 2 == whole.backward_flops
