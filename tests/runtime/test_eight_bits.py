# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits: a step equals Optax's for any cut, in less memory."""

import math
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.costs.stage_memory import static_bytes
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.optimizers.decay import matrices
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.settings.config import OptimizerConfig
from tests.jax_settings import as_released
from tests.runtime.oracle import oracle_gradients, random_batch
from tests.runtime.test_update import PLAN, fully_optimised

MODEL = llama_model(
    LlamaConfig(
        name="llama",
        vocab_size=128,
        hidden_size=64,
        inner_size=128,
        num_blocks=4,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=8,
    )
)
CONFIG = OptimizerConfig(
    state_bits=8, learning_rate=1e-2, warmup_steps=0, schedule="constant"
)
ONE = Plan(
    model="llama",
    seq_len=8,
    global_batch=10,
    replicas=(
        Replica(
            num_microbatches=5,
            microbatch_size=2,
            stages=(Stage(node="a", devices=(0,), layers=(0, 6), launch_ahead=1),),
        ),
    ),
)
RULE = optimizer(CONFIG, 9)  # only one: stages of the same rule share their programs
BATCHES = [random_batch(PLAN, MODEL.vocab_size, step) for step in range(4)]


def runtime_of(plan: Plan, rule: optax.GradientTransformation = RULE) -> StageRuntime:
    devices = jax.devices()
    nodes = {"a": devices[:2], "b": devices[2:6]}
    runtime = StageRuntime(plan, MODEL, nodes, rule, clip_norm=math.inf)
    runtime.initialise(0)
    return runtime


def state_of(runtime: StageRuntime) -> dict[str, np.ndarray]:
    return {entry.name: np.array(value) for entry, value in runtime.entries()}


def moment(state: dict[str, np.ndarray], name: str, path: str) -> np.ndarray:
    """Return a moment in fp32, decoded as the codes are defined."""
    if f"opt.0.{name}.exact.{path}" in state:
        return state[f"opt.0.{name}.exact.{path}"]
    codes = state[f"opt.0.{name}.codes.{path}"].astype(np.float64)
    block, _, leaf = path.rpartition(".")
    scales = state[f"opt.0.{name}.scales.{block.rpartition('.')[2]}.{leaf}.{block}"]
    root = codes / 127 if name == "mu" else (codes + 1) / 256
    return (np.sign(codes if name == "mu" else 1) * root**4 * scales).astype(np.float32)


def weights(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    of = (name for name in state if name.startswith("params."))
    return {name.removeprefix("params."): state[name] for name in of}


@cache
def after_three_steps() -> tuple[StageRuntime, dict[str, np.ndarray]]:
    with fully_optimised(), as_released():
        runtime = runtime_of(PLAN)
        assert all(s.updates.stack_updates for s in runtime.stages.values())
    for step in range(3):
        runtime.step(step, BATCHES[step])
    return runtime, state_of(runtime)


@pytest.mark.usefixtures("quick_compiling")
def test_a_step_is_that_of_adamw_from_the_state_that_is_held():
    before = after_three_steps()[1]
    assert sum(".codes." in name for name in before) > 40
    params: Any = weights(before)
    rule = optax.adamw(1e-2, 0.9, 0.95, weight_decay=0.1, mask=matrices)
    names = {path: path for path in params}
    state: Any = rule.init(params)
    mu = {path: moment(before, "mu", path) for path in names}
    nu = {path: moment(before, "nu", path) for path in names}
    adam = state[0]._replace(count=np.int32(3), mu=mu, nu=nu)
    _, grads = oracle_gradients(MODEL, params, BATCHES[3])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        after: Any
        updates, after = rule.update(grads, (adam, *state[1:]), params)
        expected: Any = optax.apply_updates(params, updates)
    runtime = runtime_of(PLAN)
    runtime.restore(lambda entry: before[entry.name])
    runtime.step(3, BATCHES[3])
    found = state_of(runtime)
    for path, value in weights(found).items():
        np.testing.assert_allclose(value, expected[path], atol=2e-5, err_msg=path)
    for path in names:
        exact = np.asarray(after[0].mu[path])
        error = np.abs(moment(found, "mu", path) - exact)
        assert np.all(error <= 2.1 / 127 * np.abs(exact).max() + 1e-8), path


def test_unlike_cuts_hold_the_same_bits_and_another_plan_takes_them_over():
    runtime, saved = after_three_steps()
    held: dict[str, np.ndarray] = {}
    num_compared = 0
    for entry, value in runtime.held():
        if entry.name in held:
            np.testing.assert_array_equal(value(), held[entry.name], entry.name)
            num_compared += 1
        held[entry.name] = np.array(value())
    assert num_compared == len(held)
    other = runtime_of(ONE)
    other.restore(lambda entry: saved[entry.name])
    there = state_of(other)
    assert there.keys() == saved.keys()
    for name, value in there.items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)


@pytest.mark.usefixtures("quick_compiling")
def test_the_plan_changes_no_losses():
    runtimes = [runtime_of(plan) for plan in (ONE, PLAN)]
    for step in range(4):
        one, other = (r.step(step, BATCHES[step]).loss() for r in runtimes)
        assert other == pytest.approx(one, rel=1e-4)


def test_bytes_are_those_foretold_and_an_update_needs_no_more_than_a_leaf():
    runtime = after_three_steps()[0]
    for (r, s), state in runtime.stages.items():
        mesh = PLAN.replicas[r].stages[s].mesh
        stacks = [named.stack for named in runtime.partition.stages[r, s].stacks]
        leaves = jax.tree.leaves(state.opt_state)
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert static_bytes(stacks, mesh, "float32", RULE.init).optimizer == held
    alone = runtime_of(ONE, optimizer(CONFIG, 9)).stages[0, 0].updates
    for stack, update in zip(alone._stacks, alone.stack_updates, strict=True):
        largest = max(4 * math.prod(p.shape) for p in stack.leaves().values())
        temporary: Any = update.memory_analysis()
        assert temporary.temp_size_in_bytes <= 6 * largest + 4096
