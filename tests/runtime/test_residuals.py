# SPDX-License-Identifier: Apache-2.0
"""Residuals hold only activations, never weights, under every remat choice."""

import math
from typing import Any

import jax
import optax
import pytest

from hetjax.models.decoders import GPTConfig, LlamaConfig, gpt_model, llama_model
from hetjax.models.experts.moe import Routing
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Remat, Replica, Stage, StageMesh
from hetjax.runtime.execution.programs import StagePrograms
from hetjax.runtime.execution.stage_runtime import StageRuntime

pytestmark = pytest.mark.usefixtures("quick_compiling")

SEQ_LEN, WIDTH = 16, 64
SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=WIDTH, num_blocks=4, num_heads=4, max_seq_len=SEQ_LEN
)
LLAMA: dict[str, Any] = dict(inner_size=4 * WIDTH, num_kv_heads=4)
MODELS = {
    "gpt": gpt_model(GPTConfig(name="gpt", **SIZES)),
    "llama": llama_model(LlamaConfig(name="llama", **SIZES, **LLAMA)),
    "biased": llama_model(
        LlamaConfig(
            name="biased",
            **SIZES,
            **LLAMA,
            biases="all",
            mlp_biases=True,
            residual_scale=0.22,
            query_scale=0.1,
        )
    ),
    "moe": llama_model(
        LlamaConfig(
            name="moe", **SIZES, **LLAMA, routing=Routing(num_experts=4, top_k=2)
        )
    ),
}


def middle_stage(
    model: Model, remat: Remat, mesh: StageMesh, size: int, dtype: str
) -> StagePrograms:
    """Return the middle of three stages: a scanned run of the first three blocks."""
    devices = tuple(range(mesh.data * mesh.tensor))
    last = len(model.layers)
    stages = tuple(
        Stage(
            node="n",
            devices=devices,
            mesh=mesh,
            layers=layers,
            remat=remat,
            launch_ahead=1,
        )
        for layers in [(0, 1), (1, 4), (4, last)]
    )
    plan = Plan(
        model=model.name,
        seq_len=SEQ_LEN,
        global_batch=size,
        replicas=(Replica(num_microbatches=1, microbatch_size=size, stages=stages),),
    )
    nodes = {"n": jax.devices()}
    return (
        StageRuntime(plan, model, nodes, optax.sgd(0.1), dtype=dtype)
        .stages[0, 1]
        .programs
    )


def num_bytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


ONE, FOUR, TWO = StageMesh(), StageMesh(data=2, tensor=2), StageMesh(tensor=2)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("remat", "mesh", "dtype"),
    [
        ("none", ONE, "float32"),
        ("none", FOUR, "float32"),
        ("none", TWO, "bfloat16"),
        ("selective", FOUR, "float32"),
    ],
)
def test_residuals_grow_with_the_microbatch_and_hold_no_weights(
    family: str, remat: Remat, mesh: StageMesh, dtype: str
):
    small, large = (
        num_bytes(middle_stage(MODELS[family], remat, mesh, size, dtype).saved)
        for size in (2, 4)
    )
    weights = num_bytes(middle_stage(MODELS[family], remat, mesh, 2, dtype).params)
    constant_part = 2 * small - large  # bytes kept for zero sequences
    assert 0 <= constant_part < 0.02 * weights


@pytest.mark.parametrize("family", MODELS)
def test_full_remat_keeps_one_input_per_layer(family: str):
    size = 2
    programs = middle_stage(MODELS[family], "full", StageMesh(), size, "float32")
    assert num_bytes(programs.saved) == 3 * size * SEQ_LEN * WIDTH * 4


def test_the_compiled_forward_puts_out_what_was_counted():
    programs = middle_stage(MODELS["llama"], "none", StageMesh(), 2, "float32")
    analysis = programs.forward.memory_analysis()  # pyright: ignore
    outputs = num_bytes(programs.saved) + num_bytes(programs.outputs)
    table = 8 * (len(programs.saved) + 1)  # the pointer table, which XLA counts too
    assert outputs <= analysis.output_size_in_bytes <= outputs + table
