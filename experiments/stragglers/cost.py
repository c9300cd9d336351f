# SPDX-License-Identifier: Apache-2.0
"""Measures what it costs to time the actions of every step.

    python -m experiments.stragglers.cost [--steps 40] [--blocks 8]

Runs steps of a small pipeline of four stages in this process. `watching_us` is the CPU
time of the watching threads (`runtime/execution/action_watch.py`), for each action that
they watch; `share` is its share of the step's wall time if no spare core did that work.
Here every step is watched; a run watches only so many that this costs about 1 % of its
time (`training/observers/slow_devices.py`). `detector_us` is the detector's time for a
step, on the controller.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jax
import optax

from experiments.benchmarks.one_jit import even_pipeline, random_batch
from experiments.machine import machine
from hetjax.costs.slowness.detector import NUM_COLD, NUM_FIRST, Detector
from hetjax.costs.slowness.step_times import StepTimes, lanes_of
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.runtime.execution import action_watch
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.step_clock import StepClock

_STAGES, _MICROBATCHES, _WARM = 4, 8, 3


def study(num_steps: int, num_blocks: int) -> dict[str, Any]:
    """Return the result, as JSON values."""
    config = LlamaConfig(
        name="watched",
        vocab_size=512,
        hidden_size=128,
        inner_size=384,
        num_blocks=num_blocks,
        num_heads=4,
        num_kv_heads=4,
        max_seq_len=256,
    )
    model = llama_model(config)
    plan = even_pipeline(model, _STAGES, _MICROBATCHES, 1)
    runtime = StageRuntime(plan, model, {"node": jax.devices()}, optax.adam(1e-4))
    runtime.initialise(0)
    batch = random_batch(plan, config.vocab_size)
    clock = StepClock()
    watched = list[StepTimes]()
    spent: dict[int, tuple[int, float]] = {}  # by thread: actions, CPU seconds

    def wait(made: Any) -> None:
        waited(made)
        me = threading.get_ident()
        spent[me] = spent.get(me, (0, 0.0))[0] + 1, time.thread_time()

    waited = action_watch._wait
    with patch.object(action_watch, "_wait", wait):
        for number in range(num_steps + _WARM):
            if number == _WARM:
                before, begin_s = dict(spent), time.perf_counter()
            runtime.step(number, batch, clock.begin(number))
            if (found := clock.pop_finished(number)) is not None:
                parts = {(r, s, kind): took_s for r, s, kind, took_s in found.worked()}
                watched.append(StepTimes(step=number, parts=parts, links={}))
        jax.block_until_ready([s.masters for s in runtime.stages.values()])
        step_s = (time.perf_counter() - begin_s) / num_steps
    num_actions = sum(n - before[me][0] for me, (n, _) in spent.items())
    cpu_s = sum(s - before[me][1] for me, (_, s) in spent.items())
    return {
        "command": "python -m experiments.stragglers.cost",
        "machine": machine(),
        "steps": num_steps,
        "step_s": round(step_s, 4),
        "actions": round(num_actions / num_steps),
        "watching_us": round(cpu_s / num_actions * 1e6, 1),
        "share": round(cpu_s / num_steps / step_s, 4),
        "detector_us": round(_detector_s(plan, watched) * 1e6, 1),
    }


def _detector_s(plan: Any, watched: list[StepTimes]) -> float:
    """Return the detector's seconds for a step's times, once there is a reference."""
    detector = Detector()
    detector.begin(lanes_of(plan, {"node": "cpu"}))
    steps = [watched[n % len(watched)] for n in range(NUM_COLD + NUM_FIRST + 200)]
    for times in steps[:-100]:
        detector.add(times)
    with _took() as took:
        for times in steps[-100:]:
            detector.add(times)
    return took[0] / 100


@contextmanager
def _took() -> Iterator[list[float]]:
    begin_s, found = time.perf_counter(), list[float]()
    yield found
    found.append(time.perf_counter() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=8)
    given = parser.parse_args()
    simulate_devices(_STAGES)
    print(json.dumps(study(given.steps, given.blocks), indent=1))


if __name__ == "__main__":
    main()
