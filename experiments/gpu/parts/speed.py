# SPDX-License-Identifier: Apache-2.0
"""Steps of one stage beside one plain jit, and beside what the product predicts.

Owns the times, the share of the device's rate, and the peak of its memory. Does not own
the stage (`one_stage.py`) nor the yardstick (`experiments/benchmarks/one_jit.py`).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks.one_jit import one_jit
from experiments.gpu.one_stage import CLIP_NORM, KEY, NODE, OneStage, node_of, one_stage
from experiments.gpu.options import config_of
from hetjax.cluster.catalogue import device_spec
from hetjax.costs.graph.flops import forward_flops
from hetjax.schedule.simulation.memory import MemoryUse

_WARM_UP = 2  # steps


def speed(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    of = one_stage(
        config_of(arguments),
        node_of(device),
        microbatches=arguments.microbatches,
        size=arguments.microbatch_size,
        remat=arguments.remat,
        dtype=arguments.dtype,
        attention=arguments.attention,
    )
    optimizer = optax.adamw(1e-4)
    predicted = of.predicted(optimizer)  # refuses what the device cannot hold
    runtime_s, told, peaks = _by_runtime(of, device, optimizer, arguments.steps)
    compiled = of.compiled(optimizer, told)
    plain_s = _by_plain_jit(of, device, optimizer, arguments.steps)
    rate = matrix_rate(device, arguments.matrix_size, of.precision)
    predicted_s = predicted.simulation.step_time_s
    return {
        "model": of.model.name,
        "precision": of.precision,
        "attention": of.stage.attention,
        "remat": of.stage.remat,
        "seq_len": of.plan.seq_len,
        "tokens_per_step": of.plan.tokens_per_step,
        "matrix_rate_tflops": rate / 1e12,
        "catalogue_tflops": device_spec(of.node).peak_tflops,
        "runtime": _figures(of, runtime_s, rate),
        "plain_jit": _figures(of, plain_s, rate),
        "ratio": runtime_s / plain_s,
        "predicted_step_s": predicted_s,
        "predicted_over_measured_step": predicted_s / runtime_s,
        "memory": _memory(
            predicted.memory[f"{NODE}/0"], of.memory(optimizer, compiled), peaks
        )
        | {"compiled_temp_bytes": told},
    }


def _by_runtime(
    of: OneStage,
    device: jax.Device,
    optimizer: optax.GradientTransformation,
    steps: int,
) -> tuple[float, dict[str, int], dict[str, int | None]]:
    """Seconds of a step, what the compiler says, and the peaks of memory."""
    runtime = of.runtime(device, optimizer, clip_norm=CLIP_NORM)
    batch = of.batch()
    runtime.compile()
    compiling = _peak_bytes(device)  # a compiler tries out kernels on the device
    runtime.initialise(0)

    def step(number: int) -> None:
        runtime.step(number, batch, loss_scale=of.loss_scale)
        jax.block_until_ready([state.params for state in runtime.stages.values()])

    step_s = _median_step_s(steps, step)
    peaks = {"while_compiling": compiling, "measured": _peak_bytes(device)}
    runtime.close()  # the yardstick needs the memory
    return step_s, runtime.temp_bytes()[KEY], peaks


def _by_plain_jit(
    of: OneStage,
    device: jax.Device,
    optimizer: optax.GradientTransformation,
    steps: int,
) -> float:
    """The same attention, as the plan says it."""
    held, train = one_jit(
        of.model, of.plan, device, optimizer, clip_norm=CLIP_NORM, dtype=of.precision
    )
    batch = of.batch()

    def step(_: int) -> None:
        nonlocal held
        *held, _loss = train(*held, *batch)
        jax.block_until_ready(held)

    return _median_step_s(steps, step)


def _median_step_s(steps: int, step: Callable[[int], None]) -> float:
    times_s = []
    for number in range(steps + _WARM_UP):
        start_s = time.perf_counter()
        step(number)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[_WARM_UP:])


def _figures(of: OneStage, step_s: float, rate: float) -> dict[str, float]:
    flops = 3 * sum(forward_flops(of.model, of.plan.seq_len)) * of.plan.global_batch
    return {
        "step_s": step_s,
        "tokens_per_s": of.plan.tokens_per_step / step_s,
        "mfu": flops / step_s / (device_spec(of.node).peak_tflops * 1e12),
        "mfu_of_measured_rate": flops / step_s / rate,
    }


def _memory(
    by_model: MemoryUse, by_compiler: MemoryUse, peaks: dict[str, int | None]
) -> dict[str, Any]:
    """Bytes at the peak by the model, with the compiler's workspace, and measured."""
    measured = peaks["measured"]
    predicted = {
        "predicted": by_model.total_bytes,
        "predicted_once_compiled": by_compiler.total_bytes,
    }
    return {
        "bytes": predicted | peaks,
        "parts": by_model.parts,
        "over_measured": {
            name: total / measured if measured else None
            for name, total in predicted.items()
        },
    }


def _peak_bytes(device: jax.Device) -> int | None:
    """Of this process so far; CPUs do not tell."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def matrix_rate(
    device: jax.Device, size: int, precision: str, repeats: int = 10
) -> float:
    """Best measured rate of a product of so many rows and columns, in FLOP/s."""
    a = jax.device_put(jnp.ones((size, size), precision), device)
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(product(a))
        times_s.append(time.perf_counter() - start_s)
    return 2 * size**3 / min(times_s)
