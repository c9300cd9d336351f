# SPDX-License-Identifier: Apache-2.0
"""Stages of unlike precision agree with one fp32 jit; overflowing steps are skipped."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.cluster.catalogue import Precision
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.experts.moe import Routing
from hetjax.models.model import Model, apply
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.runtime.execution import programs, stages
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.settings.config import OptimizerConfig
from tests.runtime.oracle import (
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    oracle_params,
    random_batch,
)
from tests.runtime.random_plans import random_case

pytestmark = pytest.mark.usefixtures("quick_compiling")

SCALE = 2.0**10
_SIZES: Any = dict(
    vocab_size=128,
    hidden_size=32,
    inner_size=64,
    num_blocks=3,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=8,
)
MODEL = llama_model(LlamaConfig(name="llama", **_SIZES))
ROUTED = llama_model(
    LlamaConfig(name="llama", **_SIZES, routing=Routing(num_experts=4, top_k=2))
)
# A gradient's distance from the fp32 oracle's, over its norm: some successive roundings
# of 2**-11 and of 2**-8. Measured where all stages have the precision: 0.0013 and
# 0.0106.
WITHIN = {"float16": 0.003, "bfloat16": 0.02, "float32": 1e-5}

AS_WRITTEN: Any = {"xla_allow_excess_precision": False}  # else a CPU skips roundings


def plan_of(
    cuts: list[int],
    precisions: Sequence[Precision],
    schedule: str = "1f1b",
    meshes: tuple[StageMesh, ...] = (),
) -> Plan:
    """Return one replica of the model, cut before these layers, on devices in order."""
    layers = list(zip([0, *cuts], [*cuts, 5], strict=True))
    meshes = meshes or (StageMesh(),) * len(layers)
    ends = np.cumsum([mesh.data * mesh.tensor for mesh in meshes]).tolist()
    found = [
        Stage(
            node="n",
            devices=tuple(range(end - mesh.data * mesh.tensor, end)),
            mesh=mesh,
            layers=own,
            launch_ahead=len(layers) - s,
            precision=precision,
        )
        for s, (own, mesh, end, precision) in enumerate(
            zip(layers, meshes, ends, precisions, strict=True)
        )
    ]
    replica = Replica(num_microbatches=3, microbatch_size=2, stages=tuple(found))
    return Plan(
        model="llama",
        seq_len=8,
        global_batch=6,
        schedule=schedule,
        replicas=(replica,),
    )


def runtime_of(
    plan: Plan, optimizer: optax.GradientTransformation, model: Model = MODEL, seed=0
) -> StageRuntime:
    params = fresh_params(model, seed)
    nodes = {stage.node for _, _, stage in plan.stages()}
    devices = dict.fromkeys(nodes, jax.devices())
    runtime = StageRuntime(plan, model, devices, optimizer)
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    return runtime


@cache
def fresh_params(model: Model, seed: int) -> dict[str, np.ndarray]:
    """Return weights at their initial scale: larger ones would magnify rounding."""
    found = oracle_params(model, seed)
    return {path: np.asarray(value) for path, value in found.items()}


def distances(plan: Plan, model: Model = MODEL, seed: int = 0) -> dict[str, float]:
    """Return each gradient's distance from the oracle's, over the oracle's norm."""
    batch = random_batch(plan, model.vocab_size, seed)
    loss, expected = oracle_gradients(model, fresh_params(model, seed), batch)
    runtime = runtime_of(plan, keep_gradients(), model, seed)
    scale = SCALE if runtime.is_scaled else None
    commit = runtime.step(0, batch, loss_scale=scale)
    squares = sum(np.sum(np.square(g, dtype=np.float64)) for g in expected.values())
    assert commit.loss() == pytest.approx(loss, rel=0.001)
    assert commit.grad_norm == pytest.approx(squares**0.5, rel=0.02)
    found = kept_gradients(runtime)
    assert found.keys() == expected.keys()
    for holders in found.values():
        for other in holders[1:]:
            np.testing.assert_array_equal(other, holders[0])
    norms = {
        # Softmax ignores a shift of all scores, so the gradient of a key bias is
        # rounding.
        path: np.linalg.norm(expected[path.replace("k_bias", "q_bias")])
        for path in expected
    }
    return {
        path: float(np.linalg.norm(holders[0] - expected[path]) / norms[path])
        for path, holders in found.items()
    }


@pytest.mark.parametrize(
    ("cuts", "precisions", "schedule"),
    [
        ([2], ["float32", "float16"], "zero-bubble"),
        ([1, 3], ["float16", "bfloat16", "float32"], "1f1b"),
        ([2, 4], ["bfloat16", "float32", "float16"], "zero-bubble"),
        ([2, 3], ["float32", "float16", "bfloat16"], "1f1b"),
    ],
)
def test_gradients_of_stages_of_unlike_precision_are_near_those_of_one_fp32_jit(
    cuts: list[int], precisions: Sequence[Precision], schedule: str
):
    found = distances(plan_of(cuts, precisions, schedule))
    coarsest = max(precisions, key=WITHIN.__getitem__)
    assert max(found.values()) <= WITHIN[coarsest]
    assert max(found.values()) > WITHIN["float32"], "nothing was rounded"


def rounded_gradients(
    precisions: Sequence[Precision], cut: int, params: Any, batch: Any, scale: float
) -> dict[str, np.ndarray]:
    """Return the gradients of one jit that rounds where stages do, without the runtime.

    Weights and incoming activations have the precision of their stage. A gradient
    returns in the precision of the stage that sends it, as derivatives of conversions
    do.
    """
    modules = [(n, m) for n, layer in enumerate(MODEL.layers) for m in layer.modules]

    def loss(params: Any, tokens_BL: Any, targets_BL: Any) -> jax.Array:
        x = tokens_BL
        for n, module in modules:
            dtype, prefix = precisions[n >= cut], module.path + "."
            own = {
                path.removeprefix(prefix): value.astype(dtype)
                for path, value in params.items()
                if path.startswith(prefix)
            }
            last = (targets_BL,) if module is MODEL.modules[-1] else ()
            x = apply(module, own, x if x.ndim == 2 else x.astype(dtype), *last)[0]
        return scale * x

    traced, total = jax.jit(jax.grad(loss)).trace(params, *(b[:2] for b in batch)), {}
    with jax.numpy_dtype_promotion("standard"):  # JAX's own bf16 attention needs it
        step = traced.lower().compile(compiler_options=AS_WRITTEN)
    for first in range(0, len(batch[0]), 2):
        found = step(params, *(b[first : first + 2] for b in batch))
        total = {path: total.get(path, 0) + np.asarray(g) for path, g in found.items()}
    return {path: g / (scale * batch[0].size) for path, g in total.items()}


@pytest.mark.parametrize(
    "precisions",
    [("bfloat16", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_stages_round_where_they_say_and_nowhere_else(
    precisions: Sequence[Precision], monkeypatch: pytest.MonkeyPatch
):
    """The distance is fp32's rounding, 1,000 times less than the stages' rounding."""
    monkeypatch.setattr(
        programs, "compiler_options", lambda mesh, deterministic: AS_WRITTEN
    )
    stages._shared.cache_clear()
    params, batch = (
        fresh_params(MODEL, 0),
        random_batch(plan_of([2], precisions), 128, 0),
    )
    runtime = runtime_of(plan_of([2], precisions), keep_gradients())
    scale = SCALE if runtime.is_scaled else None
    runtime.step(0, batch, loss_scale=scale)
    stages._shared.cache_clear()
    found = kept_gradients(runtime)
    expected = rounded_gradients(precisions, 2, params, batch, scale or 1.0)
    _, exact = oracle_gradients(MODEL, params, batch)
    apart, rounding = (
        [
            float(np.linalg.norm(holders[0] - of[path]) / np.linalg.norm(exact[path]))
            for path, holders in found.items()
        ]
        for of in (expected, exact)
    )
    assert max(apart) <= 1e-6 and min(rounding) >= 1e-3


@pytest.mark.parametrize("seed", [8, 10])
def test_random_plans_of_unlike_precision_are_near_one_fp32_jit(seed: int):
    rng, case = random.Random(seed), random_case(seed)
    drawn: list[Precision] = ["float16", "bfloat16", "float32"]

    def some(replica: Replica) -> Replica:
        precise = (replace(s, precision=rng.choice(drawn)) for s in replica.stages)
        return replace(replica, stages=tuple(precise))

    plan = replace(case.plan, replicas=tuple(map(some, case.plan.replicas)))
    found = distances(plan, case.model, seed)
    assert max(found.values()) <= WITHIN["bfloat16"]


def test_a_float16_stage_multiplies_in_float16_and_knows_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
):
    """The test reads the input of the compiler, since a CPU's compiler converts it."""
    lower, texts = programs.lowered, list[str]()

    def kept(*arguments: Any, **options: Any) -> Any:
        found = lower(*arguments, **options)
        texts.append(found.as_text())
        return found

    stages._shared.cache_clear()
    plan = plan_of([2, 3], ["float32", "float16", "float32"])
    own = runtime_of(plan, optax.sgd(0.1)).stages[0, 1].programs
    monkeypatch.setattr(programs, "lowered", kept)
    made = own.forward, own.backward, own.input_gradient, own.weight_gradient
    for text in texts:
        dots = [line for line in text.splitlines() if "dot_general" in line]
        assert dots
        for line in dots:
            factors, product = line.rsplit("->", 1)
            assert factors.count("xf16>") == 2, line
            # attention sums its scores in float32
            assert product.endswith(("xf16>", "xf32>")), line
        assert "bf16" not in text
    assert len(texts) == len(made)


def state_of(runtime: StageRuntime) -> dict[str, np.ndarray]:
    return {entry.name: np.array(value) for entry, value in runtime.entries()}


def test_an_overflow_of_one_stage_skips_the_step_everywhere():
    """Only the count of the learning-rate schedule advances, as it counts all steps."""
    replicas = [
        plan_of([2], ["float32", "float16"]).replicas[0],
        plan_of([2], ["bfloat16", "float32"]).replicas[0],
    ]
    plan = plan_of([2], ["float32", "float32"])
    plan = replace(plan, global_batch=12, replicas=tuple(_elsewhere(replicas)))
    settings = OptimizerConfig(schedule="linear", warmup_steps=0, ema=0.5)
    runtime = runtime_of(plan, optimizer(settings, 9))
    batches = [random_batch(plan, MODEL.vocab_size, step) for step in range(3)]
    assert not runtime.step(0, batches[0], loss_scale=SCALE).is_skipped
    before = state_of(runtime)
    params = [jax.device_get(s.params) for s in runtime.stages.values()]
    commit = runtime.step(1, batches[1], loss_scale=2.0**30)
    assert commit.is_skipped and not np.isfinite(commit.grad_norm)
    assert np.isfinite(commit.loss())
    after = state_of(runtime)
    counts = {name for name in after if not np.array_equal(after[name], before[name])}
    assert counts and all(name.startswith("opt.rule.2.count") for name in counts)
    assert all(after[name] == before[name] + 1 for name in counts)
    for own, state in zip(params, runtime.stages.values(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, own, jax.device_get(state.params))
    assert not runtime.step(2, batches[2], loss_scale=SCALE).is_skipped
    moved = state_of(runtime)
    assert any(not np.array_equal(moved[name], after[name]) for name in moved)


def _elsewhere(replicas: list[Replica]) -> Iterator[Replica]:
    """Yield the replicas, each on its own devices."""
    for r, replica in enumerate(replicas):
        moved = (
            replace(stage, devices=tuple(d + 2 * r for d in stage.devices))
            for stage in replica.stages
        )
        yield replace(replica, stages=tuple(moved))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_power_of_two_changes_no_bit_of_fp32(
    schedule: str, monkeypatch: pytest.MonkeyPatch
):
    meshes = StageMesh(data=2), StageMesh(tensor=2)
    model = ROUTED  # its auxiliary losses are scaled, too
    plan = plan_of([2], ["float32", "float32"], schedule, meshes)
    monkeypatch.setattr(stages, "needs_scaling", lambda dtypes: True)
    found = []
    for scale in (1.0, SCALE):
        runtime = runtime_of(plan, optax.adamw(1e-2), model)
        runtime.clip_norm = 0.5
        batch = random_batch(plan, model.vocab_size, 0)
        commit = runtime.step(0, batch, loss_scale=scale)
        found.append((commit.grad_norm, state_of(runtime)))
    (norm, one), (other, scaled) = found
    assert norm == other > runtime.clip_norm
    for name, value in one.items():
        np.testing.assert_array_equal(value, scaled[name], err_msg=name)
