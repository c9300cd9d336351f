# SPDX-License-Identifier: Apache-2.0
"""Defines the benchmarks' yardstick: a training step as one jitted function.

Model, microbatches, fp32 accumulation, clipping and optimizer are a plan's, on one
device, without stages, driver or transfers. It is not the tests' oracle, which is
written separately.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.data.batches import Batch
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Remat, Replica, Stage
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.stage import function as mathematics


def even_pipeline(
    model: Model, num_stages: int, microbatches: int, size: int, remat: Remat = "none"
) -> Plan:
    """Return one replica of equal stages, one device of node "node" each."""
    bounds = np.linspace(0, len(model.layers), num_stages + 1).round().astype(int)
    stages = tuple(
        Stage(
            node="node",
            devices=(s,),
            layers=(int(bounds[s]), int(bounds[s + 1])),
            remat=remat,
            launch_ahead=min(num_stages - s, microbatches),
        )
        for s in range(num_stages)
    )
    replica = Replica(
        num_microbatches=microbatches, microbatch_size=size, stages=stages
    )
    return Plan(
        model=model.name,
        seq_len=model.max_seq_len,
        global_batch=microbatches * size,
        replicas=(replica,),
    )


def one_jit(
    model: Model,
    plan: Plan,
    device: jax.Device,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    dtype: str = "float32",
) -> tuple[tuple[Any, Any], Any]:
    """Return state and step(params, opt_state, *batch) -> (params, opt_state, loss)."""
    whole = StageRuntime(plan, model, {"node": [device]}, optimizer, dtype=dtype)
    whole.initialise(0)
    (held,) = whole.stages.values()
    function, params = held.programs.function, held.masters
    whole.close()  # its copies and optimizer state are not needed
    microbatches = plan.replicas[0].num_microbatches
    optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)

    def loss(params: Any, inputs_BL: jax.Array, targets_BL: jax.Array) -> jax.Array:
        ce, aux = mathematics.output(function, params, inputs_BL, targets_BL)
        return ce + aux

    def train(params: Any, state: Any, inputs_GL: Any, targets_GL: Any) -> Any:
        def add(acc: Any, batch: Any) -> Any:
            found = jax.value_and_grad(loss)(weights, *batch)
            return jax.tree.map(lambda a, x: a + x.astype(a.dtype), acc, found), None

        weights = jax.tree.map(lambda p: p.astype(dtype), params)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        batches = [
            x.reshape(microbatches, -1, x.shape[-1]) for x in (inputs_GL, targets_GL)
        ]
        (total, grads), _ = jax.lax.scan(add, zero, tuple(batches))
        grads = jax.tree.map(lambda g: g / targets_GL.size, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, total / targets_GL.size

    state = jax.jit(optimizer.init)(params)
    return (params, state), jax.jit(train, donate_argnums=(0, 1))


def random_batch(plan: Plan, vocab_size: int) -> Batch:
    """Return random tokens, the same at every call."""
    rng = np.random.default_rng(0)
    shape = (plan.global_batch, plan.seq_len)
    inputs, targets = (rng.integers(0, vocab_size, shape) for _ in range(2))
    return inputs.astype(np.int32), targets.astype(np.int32)
