# SPDX-License-Identifier: Apache-2.0
"""A model with adapters, an uneven plan for it, and its oracle: one merged formula."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.data.batches import Batch
from hetjax.models.configs import LlamaConfig
from hetjax.models.decoders import llama_model
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Remat, Replica, Stage, StageMesh
from tests.runtime.oracle import oracle_loss_sums
from tests.runtime.random_plans import SEQ_LEN, Case
from tests.runtime.random_weights import random_params

LORA = LoraConfig(rank=3, alpha=6.0)
BASE = llama_model(
    LlamaConfig(
        name="lora",
        vocab_size=100,
        hidden_size=16,
        inner_size=32,
        num_blocks=3,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=SEQ_LEN,
        tied=True,
    )
)


def uneven_plan(model: Model, remat: Remat = "none") -> Plan:
    """Return a plan of two replicas that are cut differently.

    One has three stages, one of them split over tensor. The other has two stages, one
    of them split over data.
    """
    cut, shared = StageMesh(tensor=2), StageMesh(data=2)
    three = (
        Stage(node="even", devices=(0,), layers=(0, 1), launch_ahead=3, remat=remat),
        Stage(
            node="even",
            devices=(1, 2),
            mesh=cut,
            layers=(1, 4),
            launch_ahead=2,
            remat=remat,
        ),
        Stage(node="even", devices=(3,), layers=(4, 5), launch_ahead=1),
    )
    two = (
        Stage(node="odd", devices=(4, 5), mesh=shared, layers=(0, 2), launch_ahead=2),
        Stage(node="odd", devices=(6,), layers=(2, 5), launch_ahead=1, remat=remat),
    )
    replicas = tuple(
        Replica(num_microbatches=2, microbatch_size=size, stages=stages)
        for size, stages in ((1, three), (2, two))
    )
    return Plan(model=model.name, seq_len=SEQ_LEN, global_batch=6, replicas=replicas)


def case_of(model: Model, remat: Remat = "none") -> Case:
    return Case(model, uneven_plan(model, remat), num_devices=7)


@cache
def adapted() -> Model:
    return with_adapters(BASE, LORA)


def parts(model: Model, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random values of the model's own parameters, and of its adapters."""
    values = random_params(model, seed)
    adapters = {path: value for path, value in values.items() if "_lora_" in path}
    return {p: v for p, v in values.items() if p not in adapters}, adapters


def merged_gradients(
    own: dict[str, Any], adapters: dict[str, Any], batch: Batch, base: Model = BASE
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the mean loss and the gradients of A and B.

    One jit computes both with the weights W + alpha / rank x A B.
    """

    def loss(adapters: dict[str, Any]) -> jax.Array:
        whole = dict(own)
        for path in (p.removesuffix("_lora_a") for p in adapters if p.endswith("_a")):
            a, b = adapters[f"{path}_lora_a"], adapters[f"{path}_lora_b"]
            whole[path] = own[path] + 2.0 * jnp.tensordot(a, b, axes=1)
        return oracle_loss_sums(base, whole, *batch)[1] / batch[1].size

    value, gradients = jax.jit(jax.value_and_grad(loss))(adapters)
    return float(value), {path: np.asarray(g) for path, g in gradients.items()}
