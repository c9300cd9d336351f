# SPDX-License-Identifier: Apache-2.0
"""Quantised experts under adapters of attention, on uneven plans.

The numbers are those of one formula with the rounded weights, and the bytes those that
costs charge.
"""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from hetjax.costs.stage_memory import static_bytes
from hetjax.models.configs import FrozenForm, Routing
from hetjax.models.decoders import llama_model
from hetjax.models.model import Model, abstract_params, quantised_weights
from tests.runtime.fine_tuned import case_of, merged_gradients, uneven_plan
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_weights import random_params
from tests.runtime.test_quantised_runs import (
    CONFIG,
    as_rounded,
    begun,
    first_values,
    quantised_model,
)
from tests.runtime.test_same_numbers import NODES, Watched, assert_charged
from tests.short_runs import rows_drawn

pytestmark = pytest.mark.usefixtures("quick_compiling")

EXPERTS = ("gate", "up", "down")


def base_of(capacity_factor: float | None) -> Model:
    routing = Routing(
        num_experts=4, top_k=2, capacity_factor=capacity_factor, balance_coefficient=0.0
    )
    return llama_model(replace(CONFIG, name="experts", routing=routing))


@pytest.mark.parametrize(
    ("form", "capacity_factor"),
    rows_drawn([("nf4", 1.25), ("nf4", None), ("int8", None)], short=1),
)
def test_losses_and_gradients_are_those_of_one_jit_with_the_rounded_experts(
    form: FrozenForm, capacity_factor: float | None
):
    base = base_of(capacity_factor)
    own, adapters = first_values(7, base)
    model = quantised_model(form, base)
    runtime = begun(uneven_plan(model), model, own, adapters)
    batch = random_batch(runtime.plan, base.vocab_size, 0)
    result = runtime.step(0, batch)
    rounded = as_rounded(form, own, base)
    loss, expected = merged_gradients(rounded, adapters, batch, base)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), expected)
    assert_charged(case_of(model), runtime)
    only_attention = {
        path: own[path] if path.rpartition(".")[2] in EXPERTS else value
        for path, value in rounded.items()
    }
    other, _ = merged_gradients(only_attention, adapters, batch, base)
    assert abs(loss - other) > 1e-4 * other  # the loss shows the rounding of experts


@pytest.mark.nightly
def test_experts_that_turn_no_token_away_are_trained_on_data_ranks():
    base = base_of(None)
    plan = uneven_plan(base)  # one stage is split over data, one over tensor
    values = random_params(base, 3)
    nodes: dict[str, list[jax.Device]] = dict.fromkeys(NODES, jax.devices())
    runtime = Watched(plan, base, nodes, keep_gradients())
    runtime.restore(
        lambda entry: values.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    batch = random_batch(plan, base.vocab_size, 0)
    loss, expected = oracle_gradients(base, values, batch)
    assert runtime.step(0, batch).loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(runtime), expected)
    assert_charged(case_of(base), runtime)


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_experts_are_charged_to_the_byte_as_codes_and_scales(form: FrozenForm):
    base = base_of(None)
    own, adapters = first_values(1, base)
    model = quantised_model(form, base)
    plan = uneven_plan(model)
    runtime = begun(
        plan, model, own, adapters, optimizer=optax.adam(1e-3), dtype="bfloat16"
    )
    for r, s, stage in plan.stages():
        held = jax.tree.leaves(runtime.stages[r, s].frozen)
        on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in held)
        stacks = runtime.partition.stages[r, s].kind.stacks
        init = optax.adam(1e-3).init
        charged = static_bytes(stacks, stage.mesh, "bfloat16", init)
        assert charged.frozen == on_device
    (moe,) = {replace(m, path="") for m in model.modules if m.path.endswith(".moe")}
    assert not moe.adapters and {*quantised_weights(moe)} == {*EXPERTS}
    num_bytes = sum(
        int(np.prod(p.shape)) * np.dtype(p.dtype).itemsize
        for name, p in abstract_params(moe).items()
        if name.startswith(EXPERTS) and p.dtype is not None
    )
    # 16 inputs form blocks of 16, 128 inputs form blocks of 64
    numbers, code_bytes = 4 * 16 * 128, {"int8": 1, "nf4": 0.5}[form]
    scales = numbers / 16 + numbers / 16 + numbers / 64
    assert num_bytes == 3 * numbers * code_bytes + 4 * scales
