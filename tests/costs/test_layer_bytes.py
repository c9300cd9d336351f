# SPDX-License-Identifier: Apache-2.0
"""Layers' bytes add up to stages; arithmetic and messages of traced passes equal the
literature's formulas."""

import math
from dataclasses import dataclass

import pytest

from hetjax.costs.graph.all_reduces import all_reduces
from hetjax.costs.graph.flops import forward_flops
from hetjax.costs.graph.passes import Shares, passes
from hetjax.costs.graph.values import Cuts, Graph
from hetjax.costs.layer_bytes import layer_residuals, layer_stacks
from hetjax.costs.stage_memory import stage_memory
from hetjax.plans.plan import AttentionForm, Remat, StageMesh
from tests.costs.small_models import SEQ_LEN, WIDTH, family, pipeline

NUM_SEQUENCES = 2
ACTIVATION = NUM_SEQUENCES * SEQ_LEN * WIDTH * 4


@dataclass(frozen=True)
class Facts:
    """FLOPs of matrix products, and bytes that enter all-reduces."""

    forward_flops: int
    backward_flops: int
    forward_all_reduce_bytes: int
    backward_all_reduce_bytes: int


def shares_of(tensor: int, attention: AttentionForm | None = None) -> Shares:
    return Shares(
        num_sequences=NUM_SEQUENCES,
        seq_len=SEQ_LEN,
        hidden_size=WIDTH,
        dtype="float32",
        tensor=tensor,
        attention=attention,
    )


def facts(
    name: str,
    layer: int,
    tensor: int = 1,
    remat: Remat = "none",
    attention: AttentionForm | None = None,
) -> Facts:
    shares = shares_of(tensor, attention)
    traced = passes(layer_stacks(family(name), layer), shares, remat)
    both = traced.forward, traced.backward
    flops = [product_flops(graph, traced.cuts) for graph in both]
    reduced = [sum(n * b for b, n in all_reduces(g, traced.cuts)) for g in both]
    return Facts(*flops, *reduced)


def product_flops(graph: Graph, cuts: Cuts) -> int:
    """Return a device's FLOPs in matrix products, 2 per multiply-add."""
    total = 0
    for step in graph.steps:
        if step.body is not None:
            total += step.length * product_flops(step.body, cuts)
        if step.op == "dot_general":
            (of_lhs, _), _ = step.params["dimension_numbers"]
            depth = math.prod(cuts.shape(step.inputs[0])[dim] for dim in of_lhs)
            total += 2 * depth * math.prod(cuts.shape(step.outputs[0]))
    return total


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_residuals_of_a_run_are_its_layers_and_a_constant(name: str, remat: Remat):
    model = family(name)
    layer = layer_residuals(model, 1, shares_of(1), remat, data=1)
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
    assert residuals == layer.stack_saved_bytes + 4 * layer.saved_bytes
    end = layer_residuals(model, 5, shares_of(1), remat, data=1)
    last = stage_memory(plan, model, (0, 2))
    assert last.saved_bytes == last.input_bytes + end.saved_bytes


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_arithmetic_is_that_of_the_model_and_a_backward_is_twice_a_forward(name: str):
    """Attention that keeps no scores recomputes them for its backward."""
    block = facts(name, 2)
    model_flops = NUM_SEQUENCES * forward_flops(family(name), SEQ_LEN)[2]
    assert block.forward_flops == model_flops
    scores_flops = 2 * NUM_SEQUENCES * SEQ_LEN**2 * WIDTH
    assert block.backward_flops == 2 * block.forward_flops + scores_flops
    all_scores = facts(name, 2, attention="xla")
    assert all_scores.forward_flops == model_flops
    assert all_scores.backward_flops == 2 * model_flops


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
