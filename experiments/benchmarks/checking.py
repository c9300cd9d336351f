# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of checking a step's numbers, as a share of the step.

    python -m experiments.benchmarks.checking [--rounds 60] > FILE

Prints one JSON object. Two replicas of one model train in this process. A round is
three steps: one without checks, one that checks whether the new weights are finite, and
one that also compares digests. Their order changes from round to round; ratios are of
medians. `cost_every_20` is the cost for a run that compares digests at every twentieth
step. `alone` has the check programs by themselves, as shares of the median step without
checks: on a shared machine this is more reliable than differences of steps.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from experiments.benchmarks.one_jit import random_batch
from hetjax.mesh.multihost import to_mesh
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.model import parameter_count
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.execution.checking.checks import NO_CHECKS, StepChecks
from hetjax.runtime.execution.stage_runtime import StageRuntime

_WITH_DIGESTS = StepChecks(digests=True)
_EVERY = 20
_VARIANTS = ("none", "finite", "digests")
_WARM_UP = 2  # rounds


def runtime_of(num_blocks: int, hidden_size: int) -> StageRuntime:
    """Return two replicas of a Llama on one device each."""
    model = llama_model(
        LlamaConfig(
            name="checked",
            vocab_size=2_048,
            hidden_size=hidden_size,
            inner_size=hidden_size * 11 // 4,
            num_blocks=num_blocks,
            num_heads=8,
            num_kv_heads=8,
            max_seq_len=256,
        )
    )
    layers = (0, len(model.layers))
    replicas = tuple(
        Replica(
            num_microbatches=4,
            microbatch_size=1,
            stages=(Stage(node=node, devices=(0,), layers=layers, launch_ahead=1),),
        )
        for node in "ab"
    )
    plan = Plan(model=model.name, seq_len=256, global_batch=8, replicas=replicas)
    first, second = jax.devices()[:2]
    devices = {"a": [first], "b": [second]}
    runtime = StageRuntime(plan, model, devices, optax.adamw(1e-3), clip_norm=1.0)
    runtime.compile()
    runtime.initialise(0)
    return runtime


class Variants:
    """Takes steps with more or fewer checks."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime, self._number = runtime, 0
        self._batch = random_batch(runtime.plan, runtime.model.vocab_size)
        checks = [state.checks for state in runtime.stages.values()]
        self._finite = [(each, each.is_finite) for each in checks]

    def step_s(self, variant: str) -> float:
        """Return the seconds of a step, until the devices have finished it."""
        for checks, is_finite in self._finite:
            found = is_finite if variant != "none" else _unchecked(checks)
            checks.__dict__["is_finite"] = found
        asked = _WITH_DIGESTS if variant == "digests" else NO_CHECKS
        start_s = time.perf_counter()
        self._number += 1
        self._runtime.step(self._number, self._batch, None, None, asked)
        states = self._runtime.stages.values()
        jax.block_until_ready([(s.params, s.is_finite) for s in states])
        return time.perf_counter() - start_s


def _unchecked(checks: Any) -> Callable[[Any], jax.Array]:
    mesh = checks.updates.programs.mesh
    true = to_mesh(np.bool_(True), jax.sharding.NamedSharding(mesh, jax.P()))
    return lambda masters: true


def alone_s(runtime: StageRuntime, rounds: int) -> dict[str, float]:
    """Return the median seconds of both replicas' checks by themselves."""

    def timed(check: Callable[[Any], Any]) -> float:
        start_s = time.perf_counter()
        jax.block_until_ready([check(s) for s in runtime.stages.values()])
        return time.perf_counter() - start_s

    checks: dict[str, Callable[[Any], Any]] = {
        "finite": lambda state: state.checks.is_finite(state.masters),
        "digests": lambda state: state.checks.digests(state.masters)[1],
    }
    return {
        name: statistics.median(timed(check) for _ in range(rounds))
        for name, check in checks.items()
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runtime = runtime_of(arguments.blocks, arguments.hidden_size)
    variants = Variants(runtime)
    times: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for number in range(arguments.rounds + _WARM_UP):
        first = number % len(_VARIANTS)
        for name in (*_VARIANTS[first:], *_VARIANTS[:first]):
            took_s = variants.step_s(name)
            if number >= _WARM_UP:
                times[name].append(took_s)
    variants.step_s("finite")
    step_s = {name: statistics.median(found) for name, found in times.items()}
    finite, digests = (
        step_s["finite"] / step_s["none"] - 1,
        (step_s["digests"] - step_s["finite"]) / step_s["none"],
    )
    alone = {
        name: took_s / step_s["none"]
        for name, took_s in alone_s(runtime, arguments.rounds).items()
    }
    return {
        "step_s": step_s,
        "finite_ratio": step_s["finite"] / step_s["none"],
        "digests_ratio": step_s["digests"] / step_s["finite"],
        "cost_every_20": finite + digests / _EVERY,
        "alone": alone | {"every_20": alone["finite"] + alone["digests"] / _EVERY},
        "rounds": arguments.rounds,
        "parameters": sum(map(parameter_count, runtime.model.layers)),
        "tokens": runtime.plan.tokens_per_step,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "jax": jax.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    arguments = parser.parse_args()
    simulate_devices(2)
    print(json.dumps(measure(arguments), indent=1))


if __name__ == "__main__":
    main()
