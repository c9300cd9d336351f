# SPDX-License-Identifier: Apache-2.0
"""Compares a four-stage pipeline's step with the same work as one jit on one device.

    python -m experiments.benchmarks.driver_overhead [--steps 20] [--microbatches 8]

Prints one JSON object. `ratio` is the median over pairs of steps (pipeline, one jit;
alternating in one process) of pipeline time / one-jit time: same model, microbatches,
fp32 accumulation, clipping and AdamW. The pipeline is driven as in a run: by a
controller whose one worker is in this process.

What the number can show: simulated devices share the machine's cores, so a pipeline
cannot be faster than one device by working in parallel. Any excess above 1 is what the
driver adds (dispatch, residuals written out and read back, transfers, more and smaller
programs), less what two programs at once gain on idle cores. What it cannot show:
bubbles, link times and overlap on real devices, nor the dispatch cost of an
accelerator's runtime. `enqueue_us_per_action` is Python and JAX dispatch time alone.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import optax

from experiments.benchmarks.one_jit import even_pipeline, one_jit, random_batch
from hetjax.data.batches import Batch
from hetjax.launchers.in_process import InProcessConnections
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.schedule.programs.action import Action

CLIP_NORM = 1.0


class EnqueueTimes:
    """An observer that adds up the host time spent in actions."""

    def __init__(self) -> None:
        self.seconds, self.actions = 0.0, 0

    def enqueued(self, action: Action, start_s: float, end_s: float, made: Any) -> None:
        self.seconds += end_s - start_s
        self.actions += 1


@dataclass(frozen=True)
class OneBatch:
    """The work of the one worker: always the same batch."""

    runtime: StageRuntime
    always: Batch

    def close(self) -> None:
        self.runtime.close()

    def batch(self, step: int) -> Batch:
        return self.always

    def validation(self, number: int) -> Batch:
        return self.always


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
    devices = jax.devices()
    plan = even_pipeline(model, 4, count, size)
    batch = random_batch(plan, model.vocab_size)
    pipeline = StageRuntime(
        plan, model, {"node": devices}, optimizer, clip_norm=CLIP_NORM
    )
    connections = InProcessConnections(EMBEDDED, lambda _: OneBatch(pipeline, batch))
    controller = Controller(plan, connections)
    controller.build({})
    controller.initialise(0)
    whole = even_pipeline(model, 1, count, size)
    (params, state), train = one_jit(
        model, whole, devices[0], optimizer, clip_norm=CLIP_NORM
    )
    pairs, losses = [], []
    for step in range(arguments.steps + 2):
        start_s = time.perf_counter()
        result = controller.step(step)
        jax.block_until_ready([s.params for s in pipeline.stages.values()])
        middle_s = time.perf_counter()
        params, state, loss = train(params, state, *batch)
        jax.block_until_ready(params)
        pairs.append((middle_s - start_s, time.perf_counter() - middle_s))
        losses.append((result.loss(), float(loss)))
    pairs, times = pairs[2:], EnqueueTimes()
    for step in range(arguments.steps):
        pipeline.step(step, batch, times)
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
