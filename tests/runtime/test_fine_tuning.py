# SPDX-License-Identifier: Apache-2.0
"""Adapters and frozen parts on uneven plans, against one merged formula.

Frozen weights stay equal bit for bit; a run holds, sums and saves nothing for them.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.models.finetuning import trained_in_part
from hetjax.models.model import Model
from hetjax.plans.plan import Remat
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.stage.partition import gradient_sizes
from tests.runtime.fine_tuned import (
    BASE,
    adapted,
    case_of,
    merged_gradients,
    parts,
    uneven_plan,
)
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_weights import random_params
from tests.runtime.test_same_numbers import NODES, Watched, assert_charged

pytestmark = pytest.mark.usefixtures("quick_compiling")


def begun(
    model: Model,
    own: dict[str, Any],
    state: dict[str, Any],
    *,
    optimizer: optax.GradientTransformation | None = None,
    remat: Remat = "none",
    dtype: str = "float32",
) -> Watched:
    """Return a runtime with frozen weights `own` and its other weights from `state`."""
    nodes: dict[str, list[jax.Device]] = dict.fromkeys(NODES, jax.devices())
    runtime = Watched(
        uneven_plan(model, remat),
        model,
        nodes,
        optimizer or keep_gradients(),
        dtype=dtype,
        weights=lambda path, shape: own[path],
    )
    runtime.restore(
        lambda entry: state.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    return runtime


def frozen(runtime: StageRuntime) -> list[np.ndarray]:
    return [
        np.asarray(leaf)
        for state in runtime.stages.values()
        for leaf in jax.tree.leaves(state.frozen)
    ]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_losses_and_gradients_of_adapters_equal_those_of_the_merged_formula(
    remat: Remat,
):
    own, adapters = parts(adapted(), 0)
    runtime = begun(adapted(), own, adapters, remat=remat)
    batch = random_batch(runtime.plan, BASE.vocab_size, 0)
    result = runtime.step(0, batch)
    loss, expected = merged_gradients(own, adapters, batch)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), expected)
    assert_charged(case_of(adapted(), remat), runtime)


def test_trained_alone_a_part_has_the_gradients_that_it_has_in_the_whole():
    model = trained_in_part(BASE, r"block_001|head\.norm")
    values = random_params(BASE, 1)
    runtime = begun(model, values, values)
    batch = random_batch(runtime.plan, BASE.vocab_size, 1)
    result = runtime.step(0, batch)
    loss, expected = oracle_gradients(BASE, values, batch)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    trained = {p: g for p, g in expected.items() if "block_001" in p or "head" in p}
    assert 0 < len(trained) < len(expected)
    assert_gradients_equal(kept_gradients(runtime), trained)
    assert_charged(case_of(model), runtime)


def test_training_changes_adapters_and_no_bit_of_what_is_frozen():
    own, adapters = parts(adapted(), 2)
    runtime = begun(adapted(), own, adapters, optimizer=optax.adamw(1e-2))
    before = frozen(runtime)
    for step in range(3):
        runtime.step(step, random_batch(runtime.plan, BASE.vocab_size, step))
    for value, at_first in zip(frozen(runtime), before, strict=True):
        np.testing.assert_array_equal(value, at_first)
    saved = dict((e.name, value) for e, value in runtime.entries())
    weights = {n.removeprefix("params."): v for n, v in saved.items() if n[0] == "p"}
    assert weights.keys() == adapters.keys()
    assert all("_lora_" in name or ".count." in name for name in saved)
    assert not any(np.array_equal(weights[path], adapters[path]) for path in adapters)


def test_what_is_frozen_is_held_once_in_the_dtype_of_compute_and_never_summed():
    own, adapters = parts(adapted(), 3)
    adam, bf16 = optax.adamw(1e-2), "bfloat16"
    runtime = begun(adapted(), own, adapters, optimizer=adam, dtype=bf16)
    num_adapters = sum(value.size for value in adapters.values())
    summed = sum(sum(gradient_sizes(adapted(), (at, at + 1))) for at in range(5))
    assert summed == num_adapters
    assert gradient_sizes(adapted(), "embedding.table") == []
    for state in runtime.stages.values():
        held = state.masters, state.opt_state, state.programs.accumulators
        for path, leaf in jax.tree_util.tree_leaves_with_path(held):
            assert leaf.ndim == 0 or "_lora_" in str(path) or "count" in str(path)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.frozen)} == {bf16}
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(runtime.stages[0, s].frozen))
        for s in range(3)
    ]
    table = own["embedding.table"].size  # tied: the last stage holds it, too
    assert sum(sizes) == sum(value.size for value in own.values()) + table


def test_adapters_begin_as_nothing_and_are_drawn_alike_whoever_gives_the_weights():
    nodes: dict[str, list[jax.Device]] = dict.fromkeys(NODES, jax.devices())
    plan, own = uneven_plan(adapted()), parts(adapted(), 4)[0]
    states = []
    for weights in (None, lambda path, shape: own[path]):
        runtime = StageRuntime(
            plan, adapted(), nodes, keep_gradients(), weights=weights
        )
        runtime.initialise(7)
        states.append({e.name: value for e, value in runtime.entries()})
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name])
        if name.startswith("params.") and name.endswith("q_lora_a"):
            assert 0.2 < np.abs(value).max() <= 16**-0.5
        if name.endswith("_lora_b"):
            assert not value.any()
