# SPDX-License-Identifier: Apache-2.0
"""Schedule-free on unlike stages: it is evaluated at other weights than it trains.

The oracle is Optax on one device: its weights and its evaluation weights.
"""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from optax.contrib import schedule_free_adamw, schedule_free_eval_params

from hetjax.optimizers.optimizer import optimizer
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.runtime.execution.commit import total_loss
from hetjax.runtime.execution.serving import ServingStages, TextPiece
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.runtime.oracle import oracle_gradients, random_batch
from tests.runtime.test_update import MODEL, PLAN, weights

pytestmark = pytest.mark.usefixtures("quick_compiling")

CONFIG = OptimizerConfig(
    name="schedule-free",
    learning_rate=1e-2,
    schedule="constant",
    warmup_steps=0,
    weight_decay=0.0,
    beta1=0.8,
    beta2=0.9,
)
RULE, NUM_STEPS, PROMPT = optimizer(CONFIG, 9), 3, [5, 6, 7]
# other cuts; the host updates the first stage
OTHER = Plan(
    model="llama",
    seq_len=8,
    global_batch=10,
    replicas=(
        Replica(
            num_microbatches=5,
            microbatch_size=2,
            stages=(
                Stage(
                    node="a",
                    devices=(0, 1),
                    mesh=StageMesh(data=2),
                    layers=(0, 3),
                    launch_ahead=2,
                    offload="optimizer",
                ),
                Stage(node="b", devices=(0,), layers=(3, 6), launch_ahead=1),
            ),
        ),
    ),
)


def runtime_of(
    plan: Plan, rule: Any = RULE, kind: Any = StageRuntime, **options: Any
) -> StageRuntime:
    nodes = {"a": jax.devices()[:2], "b": jax.devices()[2:6]}
    return kind(plan, MODEL, nodes, rule, clip_norm=0.5, **options)


def state_of(runtime: StageRuntime) -> dict[str, np.ndarray]:
    return {entry.name: np.array(value) for entry, value in runtime.entries()}


@cache
def after_three_steps() -> tuple[StageRuntime, dict[str, np.ndarray]]:
    runtime = runtime_of(PLAN)
    runtime.initialise(0)
    for step in range(NUM_STEPS):
        runtime.step(step, random_batch(PLAN, MODEL.vocab_size, step))
    return runtime, state_of(runtime)


@cache
def expected() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return Optax's weights and evaluation weights from the same initial weights."""
    fresh = runtime_of(PLAN)
    fresh.initialise(0)
    params: Any = weights(fresh)
    rule = optax.chain(
        optax.clip_by_global_norm(0.5), schedule_free_adamw(1e-2, b1=0.8, b2=0.9)
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state: Any = rule.init(params)
        for step in range(NUM_STEPS):
            batch = random_batch(PLAN, MODEL.vocab_size, step)
            _, grads = oracle_gradients(MODEL, params, batch)
            updates, state = rule.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        evaluated: Any = schedule_free_eval_params(state[1], params)
    trained, mean = (jax.tree.map(np.asarray, w) for w in (params, evaluated))
    return trained, mean


def test_three_clipped_steps_are_those_of_optax():
    for path, value in weights(after_three_steps()[0]).items():
        np.testing.assert_allclose(value, expected()[0][path], atol=2e-5, err_msg=path)


@pytest.mark.parametrize("plan", [PLAN, OTHER], ids=["where it trained", "other"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_logits_are_those_of_the_weights_to_evaluate(plan: Plan, dtype: str):
    runtime = runtime_of(plan, dtype=dtype)
    runtime.restore(lambda entry: after_three_steps()[1][entry.name])
    there = runtime_of(
        plan, optax.sgd(1e-2), dtype=dtype, weights=lambda path, _: x[path]
    )
    at, x = expected()
    there.initialise(0)
    batch = random_batch(plan, MODEL.vocab_size, 9)
    losses = [total_loss(r.evaluate(0, batch)) for r in (runtime, there)]
    near = 1e-5 if dtype == "float32" else 1e-2
    assert losses[0] == pytest.approx(losses[1], rel=near)
    if dtype == "float32":
        found, trained = (
            oracle_gradients(MODEL, given, batch)[0] * batch[1].size
            for given in (x, at)
        )
        assert losses[0] == pytest.approx(found, rel=1e-5)
        assert abs(losses[0] - trained) > 1e-3 * trained
    logits: Any = [r.next_logits(1, PROMPT) for r in (runtime, there)]
    np.testing.assert_allclose(*logits, rtol=100 * near, atol=10 * near)


def test_evaluation_changes_nothing_and_is_of_the_weights_of_its_time():
    looked, blind = runtime_of(PLAN), runtime_of(PLAN)
    batch, losses = random_batch(PLAN, MODEL.vocab_size, 9), []
    for runtime in (looked, blind):
        runtime.restore(lambda entry: after_three_steps()[1][entry.name])
    for step in range(NUM_STEPS, NUM_STEPS + 2):
        losses.append(total_loss(looked.evaluate(step, batch)))
        for runtime in (looked, blind):
            runtime.step(step, random_batch(PLAN, MODEL.vocab_size, step))
    losses.append(total_loss(looked.evaluate(9, batch)))
    assert losses[-1] == total_loss(blind.evaluate(9, batch))
    assert len({*losses}) == 3
    ours, theirs = state_of(looked), state_of(blind)
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    looked.restore(lambda entry: after_three_steps()[1][entry.name])
    assert total_loss(looked.evaluate(10, batch)) == losses[0]


def test_a_step_that_is_not_finite_changes_nothing_but_the_count_of_steps():
    nodes, huge = {"a": jax.devices()[:2], "b": jax.devices()[2:6]}, 2.0**24
    runtime = StageRuntime(PLAN, MODEL, nodes, RULE, dtype="float16", clip_norm=0.5)
    runtime.restore(lambda entry: after_three_steps()[1][entry.name])
    batch = random_batch(PLAN, MODEL.vocab_size, 9)
    before = total_loss(runtime.evaluate(0, batch))
    commit = runtime.step(NUM_STEPS, batch, loss_scale=huge)
    assert commit.is_skipped and not np.isfinite(commit.grad_norm)
    assert total_loss(runtime.evaluate(1, batch)) == before
    for name, value in state_of(runtime).items():
        was = after_three_steps()[1][name]
        counts = name.startswith(("opt.step_count", "opt.base_optimizer_state.2."))
        np.testing.assert_array_equal(value, was + 1 if counts else was, err_msg=name)


def test_stages_in_use_have_the_weights_to_evaluate_alone():
    used: Any = runtime_of(PLAN, kind=ServingStages)
    used.restore(lambda entry: after_three_steps()[1][entry.name])
    piece = TextPiece(tokens=PROMPT, last=2, start=0, num_positions=8)
    found = used.next_logits(0, piece)
    logits: Any = after_three_steps()[0].next_logits(0, PROMPT)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)
    batch = random_batch(PLAN, MODEL.vocab_size, 9)
    rows = sum(sum(losses) for _, losses in used.row_losses(1, *batch))
    in_training = total_loss(after_three_steps()[0].evaluate(1, batch))
    assert rows == pytest.approx(in_training, rel=1e-5)
    assert all(s.opt_state is None is s.masters for s in used.stages.values())
