# SPDX-License-Identifier: Apache-2.0
"""Stages with unlike meshes and attention forms agree with one jit with all scores.

The lengths give the chunked form two blocks. Splash runs in Pallas' interpreter; no
test here runs cuDNN's kernel.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.models.attention import splash_kernel
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.plans.plan import AttentionForm, Plan, Remat, Replica, Stage, StageMesh
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_weights import random_params

pytestmark = pytest.mark.usefixtures("quick_compiling")

Forms = tuple[AttentionForm, AttentionForm, AttentionForm]
CUTS = ((0, 2), (2, 3), (3, 5))
MESHES = (StageMesh(data=2, tensor=2), StageMesh(), StageMesh(tensor=2))


def plan_of(forms: Forms, remats: tuple[Remat, Remat, Remat], seq_len: int) -> Plan:
    """Return three uneven stages, each on its own devices."""
    ends = np.cumsum([mesh.data * mesh.tensor for mesh in MESHES])
    stages = tuple(
        Stage(
            node="n",
            devices=tuple(range(end - mesh.data * mesh.tensor, end)),
            mesh=mesh,
            layers=layers,
            remat=remat,
            launch_ahead=3 - s,
            attention=form,
        )
        for s, (mesh, end, layers, remat, form) in enumerate(
            zip(MESHES, map(int, ends), CUTS, remats, forms, strict=True)
        )
    )
    replica = Replica(num_microbatches=2, microbatch_size=2, stages=stages)
    return Plan(
        model="llama",
        seq_len=seq_len,
        global_batch=4,
        schedule="zero-bubble",
        replicas=(replica,),
    )


def assert_same_numbers(plan: Plan) -> None:
    config: Any = dict(hidden_size=32, num_blocks=3, num_heads=4, num_kv_heads=2)
    model = llama_model(
        LlamaConfig(
            name="llama",
            vocab_size=100,
            inner_size=32,
            max_seq_len=plan.seq_len,
            **config,
        )
    )
    params, batch = random_params(model, 0), random_batch(plan, model.vocab_size, 0)
    loss, expected = oracle_gradients(model, params, batch)
    optimizer: optax.GradientTransformation = keep_gradients()
    runtime = StageRuntime(plan, model, {"n": jax.devices()}, optimizer)
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    assert runtime.step(0, batch).loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), expected)


@pytest.mark.parametrize(
    "forms", [("chunked",) * 3, ("xla",) * 3, ("chunked", "xla", "chunked")]
)
def test_forms_that_run_everywhere_have_the_numbers_of_one_jit(forms: Forms):
    assert_same_numbers(plan_of(forms, ("none", "selective", "full"), 600))


def test_splash_has_the_numbers_of_one_jit_beside_other_forms(
    monkeypatch: pytest.MonkeyPatch,
):
    interpreted = partial(splash_kernel.splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_kernel.splash, "make_splash_mha", interpreted)
    forms: Forms = ("splash", "chunked", "splash")
    assert_same_numbers(plan_of(forms, ("selective", "none", "none"), 128))
