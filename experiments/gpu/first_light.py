# SPDX-License-Identifier: Apache-2.0
"""First light on an accelerator: speed, mixed device kinds, peer transfers.

    python -m experiments.gpu.first_light speed    [--model llama-1b] [--steps 10]
    python -m experiments.gpu.first_light mixed
    python -m experiments.gpu.first_light transfer

`speed` trains a model in bf16 through the runtime (one stage) and as one plain jit,
alternating, and reports tokens/s, model FLOP utilisation against the matrix rate that
is measured in the same process, and peak memory. `mixed` runs a plan with a stage on
the accelerator and one on the host's CPU in fp32 and compares gradients with those of
the CPU alone. `transfer` pulls arrays between two
processes on the accelerator by jax.experimental.transfer and checks them.

Each prints one JSON object with the device's name. Not run on GPU so far: no figure
of it exists; `--platform cpu --model tiny` runs the code path without an accelerator.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from experiments.benchmarks.one_jit import even_pipeline, one_jit, random_batch
from hetjax.costs.graph.flops import forward_flops
from hetjax.data.batches import Batch
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.execution.stage_runtime import StageRuntime

CLIP_NORM = 1.0
TRANSFER_BYTES = (1 << 20, 16 << 20, 64 << 20)


def matrix_rate(device: jax.Device, size: int, repeats: int = 10) -> float:
    """Best measured bf16 matmul rate in FLOP/s."""
    a = jax.device_put(jnp.ones((size, size), jnp.bfloat16), device)
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(product(a))
        times_s.append(time.perf_counter() - start_s)
    return 2 * size**3 / min(times_s)


def speed(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    model = model_preset(arguments.model)
    optimizer = optax.adamw(1e-4)
    count, size = arguments.microbatches, arguments.microbatch_size
    plan = even_pipeline(model, 1, count, size, arguments.remat)
    options: dict[str, Any] = {"clip_norm": CLIP_NORM, "dtype": "bfloat16"}
    batch = random_batch(plan, model.vocab_size)
    ours_s = _runtime_step_s(
        StageRuntime(plan, model, {"node": [device]}, optimizer, **options),
        arguments.steps,
        batch,
    )
    peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
    state, train = one_jit(model, plan, device, optimizer, **options)
    held = [*state]

    def plain(_: int) -> None:
        held[0], held[1], _loss = train(held[0], held[1], *batch)
        jax.block_until_ready(held)

    plain_s = _median_step_s(arguments.steps, plain)
    rate = matrix_rate(device, arguments.matrix_size)
    flops = 3 * sum(forward_flops(model, plan.seq_len)) * plan.global_batch
    tokens = plan.tokens_per_step
    return {
        "model": model.name,
        "tokens_per_step": tokens,
        "matrix_rate_tflops": rate / 1e12,
        "runtime": _figures(ours_s, tokens, flops, rate),
        "plain_jit": _figures(plain_s, tokens, flops, rate),
        "ratio": ours_s / plain_s,
        "runtime_peak_bytes": peak_bytes,
    }


def _runtime_step_s(runtime: StageRuntime, steps: int, batch: Batch) -> float:
    def step(number: int) -> None:
        runtime.step(number, batch)
        jax.block_until_ready([state.params for state in runtime.stages.values()])

    runtime.initialise(0)
    return _median_step_s(steps, step)


def _median_step_s(steps: int, step: Any) -> float:
    times_s = []
    for number in range(steps + 2):
        start_s = time.perf_counter()
        step(number)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[2:])


def _figures(step_s: float, tokens: int, flops: int, rate: float) -> dict[str, float]:
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "mfu_of_measured_rate": flops / step_s / rate,
    }


def mixed(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """A stage on the accelerator and one on the CPU, against the CPU alone, fp32."""
    jax.config.update("jax_default_matmul_precision", "highest")
    model = model_preset("tiny")
    cpu = jax.local_devices(backend="cpu")[0]
    nodes = {"accelerator": [device], "host": [cpu]}

    def stage(node: str, layers: tuple[int, int], launch_ahead: int) -> Stage:
        return Stage(node=node, devices=(0,), layers=layers, launch_ahead=launch_ahead)

    last = len(model.layers)
    replicas = (
        Replica(
            num_microbatches=2,
            microbatch_size=2,
            stages=(stage("accelerator", (0, 3), 2), stage("host", (3, last), 1)),
        ),
    )
    whole = even_pipeline(model, 1, microbatches=2, size=2)
    plan = replace(whole, replicas=replicas)
    batch = random_batch(plan, model.vocab_size)
    loss, found = _loss_and_gradients(plan, nodes, batch)
    one_loss, expected = _loss_and_gradients(whole, {"node": [cpu]}, batch)
    errors = [
        float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in expected.items()
    ]
    return {
        "loss": loss,
        "loss_on_one_device": one_loss,
        "largest_relative_gradient_error": max(errors),
    }


def _loss_and_gradients(
    plan: Plan, nodes: dict[str, list[jax.Device]], batch: Batch
) -> tuple[float, dict[str, np.ndarray]]:
    """One step; optax.trace without decay keeps the gradient as its state."""
    model = model_preset(plan.model)
    runtime = StageRuntime(plan, model, nodes, optax.trace(decay=0.0))
    runtime.initialise(0)
    loss = runtime.step(0, batch).loss()
    kept = {e.name: v for e, v in runtime.entries() if e.name.startswith("opt.")}
    return loss, kept


def transfers(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """This process offers; a child with the same devices pulls and checks."""
    host = "127.0.0.1"
    server = transfer.start_transfer_server(
        device.client, f"{host}:0", [f"{host}:0"] * 4, transfer_size=1 << 20
    )
    for uuid, num_bytes in enumerate(TRANSFER_BYTES):
        server.await_pull(uuid, [_pattern(num_bytes, device)])
    command = [sys.executable, "-m", "experiments.gpu.first_light", "pull"]
    command += ["--platform", arguments.platform, "--address", server.address()]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if child.returncode:
        return {"works": False, "error": child.stderr[-2000:]}
    return json.loads(child.stdout.splitlines()[-1])


def pull(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    host = "127.0.0.1"
    server = transfer.start_transfer_server(
        device.client, f"{host}:0", [f"{host}:0"] * 4, transfer_size=1 << 20
    )
    connection = server.connect(arguments.address)
    rates, right = {}, True
    for uuid, num_bytes in enumerate(TRANSFER_BYTES):
        wanted = _pattern(num_bytes, device)
        sharding = SingleDeviceSharding(device)
        spec = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)
        start_s = time.perf_counter()
        (found,) = jax.block_until_ready(connection.pull(uuid, [spec]))
        rates[str(num_bytes)] = num_bytes / (time.perf_counter() - start_s)
        right &= bool(jnp.array_equal(found, wanted))
    return {"works": right, "bytes_per_s": rates}


def _pattern(num_bytes: int, device: jax.Device) -> jax.Array:
    return jax.device_put(jnp.arange(num_bytes // 4, dtype=jnp.float32), device)


PARTS = {"speed": speed, "mixed": mixed, "transfer": transfers, "pull": pull}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--remat", default="selective")
    parser.add_argument("--matrix-size", type=int, default=8192)
    parser.add_argument("--address", default="")
    arguments = parser.parse_args()
    # two processes may share one card: neither may take all of its memory at once
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.local_devices(backend=arguments.platform)[0]
    figures = PARTS[arguments.part](arguments, device)
    about = {"part": arguments.part, "device": device.device_kind}
    print(json.dumps(about | {"jax": jax.__version__} | figures))


if __name__ == "__main__":
    main()
