# SPDX-License-Identifier: Apache-2.0
"""Replicas that take over the samples of other replicas give the numbers of one jit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.checkpoint.format import Entry
from hetjax.models.decoders import GPTConfig, gpt_model
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.rerouting import rerouted
from hetjax.runtime.execution.commit import total_loss
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_plans import random_case
from tests.runtime.random_weights import random_params
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

MODEL = gpt_model(  # its table is tied: first and last stages hold it
    GPTConfig(
        name="gpt",
        vocab_size=100,
        hidden_size=16,
        num_blocks=2,
        num_heads=4,
        max_seq_len=8,
    )
)


def stage(node: str, devices: Sequence[int], layers: tuple[int, int], ahead=1) -> Stage:
    data = 2 if len(devices) == 4 else 1
    return Stage(
        node=node,
        devices=tuple(devices),
        mesh=StageMesh(data=data, tensor=len(devices) // data),
        layers=layers,
        launch_ahead=ahead,
    )


PLAN = Plan(
    model="gpt",
    seq_len=8,
    global_batch=12,
    replicas=(
        Replica(
            num_microbatches=3,
            microbatch_size=2,
            stages=(stage("a", [0], (0, 1), 2), stage("a", [1], (1, 4))),
        ),
        Replica(
            num_microbatches=1,
            microbatch_size=4,
            stages=(stage("b", [0, 1, 2, 3], (0, 4)),),
        ),
        Replica(
            num_microbatches=2,
            microbatch_size=1,
            stages=(stage("c", [0], (0, 3), 2), stage("c", [1], (3, 4))),
        ),
    ),
)
CLIP_NORM = 0.5
# One gradient is 4e-8. With Adam's usual `eps` of 1e-8, its update would follow its
# rounding, which differs between kinds of processors.
RULE = optax.adamw(1e-2, eps=1e-5)


def runtime_of(plan: Plan, rule: optax.GradientTransformation = RULE) -> StageRuntime:
    devices = jax.devices()
    nodes = {"a": devices[:2], "b": devices[2:6], "c": devices[6:]}
    runtime = StageRuntime(plan, MODEL, nodes, rule, clip_norm=CLIP_NORM)
    runtime.initialise(0)
    return runtime


def without(plan: Plan, *nodes: str) -> list[int]:
    """Return the microbatches by replica once these nodes are lost."""
    found = rerouted(plan, nodes)
    assert found is not None
    return [replica.num_microbatches for replica in found.replicas]


def weights(runtime: StageRuntime) -> dict[str, np.ndarray]:
    """Return the parameters that a checkpoint would hold."""
    saved = list(runtime.entries())
    names = [entry.name for entry, _ in saved]
    assert len(names) == len(set(names))
    return {
        name.removeprefix("params."): value
        for name, (_, value) in zip(names, saved, strict=True)
        if name.startswith("params.")
    }


class Reference:
    """One jit and Optax, starting from the weights of a runtime."""

    def __init__(self, runtime: StageRuntime) -> None:
        self.weights: Any = weights(runtime)
        self._rule = optax.chain(optax.clip_by_global_norm(CLIP_NORM), RULE)
        with jax.numpy_dtype_promotion("standard"):
            self._state = self._rule.init(self.weights)

    def follow(
        self, runtime: StageRuntime, steps: Sequence[int], scale: float | None = None
    ) -> None:
        """Train both; compare the loss and norm of every step, and the last weights."""
        for step in steps:
            batch = random_batch(runtime.plan, MODEL.vocab_size, step)
            loss, grads = oracle_gradients(MODEL, self.weights, batch)
            found = runtime.step(step, batch, loss_scale=scale)
            assert found.loss() == pytest.approx(loss, rel=1e-5)
            squares = sum(
                np.sum(np.square(g, dtype=np.float64)) for g in grads.values()
            )
            assert found.grad_norm == pytest.approx(squares**0.5, rel=1e-5)
            with (
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
            ):
                updates, self._state = self._rule.update(
                    grads, self._state, self.weights
                )
                self.weights = optax.apply_updates(self.weights, updates)
        saved = weights(runtime)
        assert saved.keys() == self.weights.keys()
        for path, value in saved.items():
            expected = self.weights[path]
            np.testing.assert_allclose(value, expected, atol=5e-6, err_msg=path)


@pytest.mark.parametrize("lost", draws(["ab", "b", "a", "c", "bc"], short=1))
def test_losses_norms_and_weights_go_on_as_in_one_jit(lost: str):
    runtime = runtime_of(PLAN)
    reference = Reference(runtime)
    reference.follow(runtime, [0])
    runtime.reroute(without(PLAN, *lost))
    reference.follow(runtime, [1, 2])
    batch = random_batch(PLAN, MODEL.vocab_size, 7)
    loss, _ = oracle_gradients(MODEL, reference.weights, batch)
    summed = total_loss(runtime.evaluate(0, batch))
    assert summed / batch[1].size == pytest.approx(loss, rel=1e-4)
    assert runtime.next_logits(0, [5, 6]) is not None


def test_programs_and_state_of_those_that_go_on_are_left_alone():
    runtime = runtime_of(PLAN)
    runtime.compile()
    states = dict(runtime.stages)
    compiled = {
        key: (set(vars(s.programs)), set(vars(s.updates))) for key, s in states.items()
    }
    masters = {key: jax.tree.leaves(s.masters) for key, s in states.items()}
    runtime.reroute(without(PLAN, "a"))
    assert {key: states[key] for key in [(1, 0), (2, 0), (2, 1)]} == runtime.stages
    for key, leaves in masters.items():
        assert all(
            a is b
            for a, b in zip(jax.tree.leaves(states[key].masters), leaves, strict=True)
        )
    runtime.step(0, random_batch(PLAN, MODEL.vocab_size, 0))
    for key, state in runtime.stages.items():
        found = set(vars(state.programs)), set(vars(state.updates))
        assert found == compiled[key], key


def test_idle_stages_keep_their_state_until_others_are_updated():
    runtime = runtime_of(PLAN)
    whole = held(runtime)
    runtime.reroute(without(PLAN, "a"))
    assert not runtime.is_behind
    assert len(held(runtime)) == len(whole)  # a's state is still current
    runtime.step(0, random_batch(PLAN, MODEL.vocab_size, 0))
    others = held(runtime)
    assert len(others) < len(whole)
    newest = {entry.name: value for entry, value in runtime.entries()}
    for entry, value in others:
        np.testing.assert_array_equal(value, newest[entry.name], err_msg=entry.name)


def test_replicas_that_come_back_go_on_with_the_state_of_the_others():
    runtime = runtime_of(PLAN)
    reference = Reference(runtime)
    runtime.reroute(without(PLAN, "a", "c"))
    reference.follow(runtime, [0, 1])
    own = [replica.num_microbatches for replica in PLAN.replicas]
    runtime.reroute(own)
    assert runtime.plan == PLAN and runtime.is_behind
    values = {entry.name: value for entry, value in held(runtime)}
    runtime.restore(lambda entry: values[entry.name])
    assert not runtime.is_behind
    reference.follow(runtime, [2])
    assert {state for state, _ in held_by_stage(runtime)} == {
        (r, s) for r, s, _ in PLAN.stages()
    }


def test_the_loss_stays_scaled_where_the_stages_that_asked_for_it_are_lost():
    half = tuple(replace(s, precision="float16") for s in PLAN.replicas[0].stages)
    plan = replace(
        PLAN, replicas=(replace(PLAN.replicas[0], stages=half), *PLAN.replicas[1:])
    )
    runtime = runtime_of(plan)
    runtime.reroute(without(plan, "a"))
    assert runtime.is_scaled
    Reference(runtime).follow(runtime, [0, 1], scale=2.0**10)


# two or three replicas with unlike schedules, cuts and meshes
@pytest.mark.parametrize("seed", draws([3, 4, 5, 10], short=2))
def test_random_plans_give_the_gradients_of_one_jit_without_a_replica(seed: int):
    case = random_case(seed)
    plan = replace(
        case.plan,
        programs={},
        replicas=tuple(
            replace(
                replica,
                stages=tuple(replace(s, node=f"n{r}") for s in replica.stages),
            )
            for r, replica in enumerate(case.plan.replicas)
        ),
    )
    nodes = [f"n{r}" for r in range(len(plan.replicas))]
    lost = next(node for node in nodes if rerouted(plan, {node}))
    params = random_params(case.model, seed)
    devices = dict.fromkeys(nodes, jax.devices())
    runtime = StageRuntime(plan, case.model, devices, keep_gradients())
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    runtime.reroute(without(plan, lost))
    batch = random_batch(plan, case.model.vocab_size, seed)
    loss, expected = oracle_gradients(case.model, params, batch)
    assert runtime.step(0, batch).loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), expected)


def held(runtime: StageRuntime) -> list[tuple[Entry, np.ndarray]]:
    return [(entry, read()) for entry, read in runtime.held()]


def held_by_stage(runtime: StageRuntime) -> Iterator[tuple[tuple[int, int], Any]]:
    yield from ((key, state.masters) for key, state in runtime.stages.items())
