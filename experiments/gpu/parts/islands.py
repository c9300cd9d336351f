# SPDX-License-Identifier: Apache-2.0
"""A stage on the accelerator and one on the host's CPU, against the CPU alone, in fp32.

Owns the plan and the comparison of gradients.
"""

import argparse
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from experiments.benchmarks.one_jit import even_pipeline, random_batch
from hetjax.data.batches import Batch
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.execution.stage_runtime import StageRuntime


def mixed(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """A stage on the accelerator and one on the CPU, against the CPU alone, fp32."""
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
    with jax.default_matmul_precision("highest"):
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
