# SPDX-License-Identifier: Apache-2.0
"""Step time of a four-stage pipeline over the same work as one jit on one device.

    python -m experiments.benchmarks.driver_overhead [--steps 20] [--microbatches 8]

Prints one JSON object. `ratio` is the median over pairs of steps (pipeline, one jit;
alternating in one process) of pipeline time / one-jit time: same model, microbatches,
fp32 accumulation, clipping and AdamW.

What the number can show: simulated devices share the machine's cores, so a pipeline
cannot be faster than one device by working in parallel; whatever it takes above 1 is
what the driver adds (dispatch, residuals written out and read back, transfers, more
and smaller programs), less what two programs at once gain on idle cores. What it
cannot show: bubbles, link times and overlap on real devices, nor the dispatch cost of
an accelerator's runtime. `enqueue_us_per_action` is Python and JAX dispatch time alone.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.mesh.simulated import simulate_devices
from hetjax.models.llama import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime import stage as mathematics
from hetjax.runtime.embedded import Embedded
from hetjax.schedule.action import Action

CLIP_NORM = 1.0


class EnqueueTimes:
    """An observer that adds up the host time spent in actions."""

    def __init__(self) -> None:
        self.seconds, self.actions = 0.0, 0

    def enqueued(self, action: Action, start_s: float, end_s: float, made: Any) -> None:
        self.seconds += end_s - start_s
        self.actions += 1


def pipeline_plan(model: Model, num_stages: int, microbatches: int, size: int) -> Plan:
    bounds = np.linspace(0, len(model.layers), num_stages + 1).round().astype(int)
    stages = tuple(
        Stage(
            node="cpu",
            devices=(s,),
            layers=(int(bounds[s]), int(bounds[s + 1])),
            launch_ahead=num_stages - s,
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


def one_jit(model: Model, optimizer: Any, plan: Plan, device: jax.Device):
    """(state, step): the same training step as one function on one device."""
    whole = Embedded(plan, model, {"cpu": [device]}, optimizer)
    whole.initialise(0)
    (held,) = whole.stages.values()
    graph, params = held.programs.graph, held.params
    microbatches = plan.replicas[0].num_microbatches

    def loss(params: Any, inputs_BL: jax.Array, targets_BL: jax.Array) -> jax.Array:
        ce, aux = mathematics.output(graph, params, inputs_BL, targets_BL)
        return ce + aux

    def train(params: Any, state: Any, inputs_GL: Any, targets_GL: Any) -> Any:
        def add(acc: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, acc, (value, grads)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        cut = [
            x.reshape(microbatches, -1, x.shape[-1]) for x in (inputs_GL, targets_GL)
        ]
        (total, grads), _ = jax.lax.scan(add, zero, tuple(cut))
        grads = jax.tree.map(lambda g: g / targets_GL.size, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, total / targets_GL.size

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optimizer)
    state = jax.jit(optimizer.init)(params)
    return (params, state), jax.jit(train, donate_argnums=(0, 1))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = llama_model(
        LlamaConfig(
            name="overhead",
            vocab_size=2_048,
            hidden_size=512,
            inner_size=1_408,
            num_blocks=arguments.blocks,
            num_heads=8,
            num_kv_heads=8,
            max_seq_len=256,
        )
    )
    optimizer = optax.adamw(1e-3)
    size, count = arguments.microbatch_size, arguments.microbatches
    plan = pipeline_plan(model, 4, count, size)
    pipeline = Embedded(
        plan, model, {"cpu": jax.devices()[:4]}, optimizer, clip_norm=CLIP_NORM
    )
    pipeline.initialise(0)
    single_plan = pipeline_plan(model, 1, count, size)
    (params, state), train = one_jit(model, optimizer, single_plan, jax.devices()[0])
    batch = _batch(plan, model.vocab_size)
    times = EnqueueTimes()
    pairs, losses = [], []
    for step in range(arguments.steps + 2):
        counted = times if step >= 2 else None
        start_s = time.perf_counter()
        result = pipeline.step(step, batch, counted)
        jax.block_until_ready([s.params for s in pipeline.stages.values()])
        middle_s = time.perf_counter()
        params, state, loss = train(params, state, *batch)
        jax.block_until_ready(params)
        pairs.append((middle_s - start_s, time.perf_counter() - middle_s))
        losses.append((result.loss(), float(loss)))
    pairs = pairs[2:]
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "pipeline_step_s": statistics.median(a for a, _ in pairs),
        "one_jit_step_s": statistics.median(b for _, b in pairs),
        "ratio_min_max": [f(a / b for a, b in pairs) for f in (min, max)],
        "steps": arguments.steps,
        "enqueue_us_per_action": 1e6 * times.seconds / times.actions,
        "enqueue_ms_per_step": 1e3 * times.seconds / arguments.steps,
        "actions_per_step": times.actions / arguments.steps,
        "losses_first_last": [losses[0], losses[-1]],
        "microbatches": count,
        "microbatch_size": size,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }


def _batch(plan: Plan, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (plan.global_batch, plan.seq_len)
    inputs, targets = (rng.integers(0, vocab_size, shape) for _ in range(2))
    return inputs.astype(np.int32), targets.astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=1)
    arguments = parser.parse_args()
    simulate_devices(4)
    print(json.dumps(measure(arguments), indent=1))


if __name__ == "__main__":
    main()
