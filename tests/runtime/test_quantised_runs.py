# SPDX-License-Identifier: Apache-2.0
"""Adapters over quantised frozen weights, on uneven plans.

The numbers are those of one merged formula with the rounded weights, and the bytes
those that costs charge. No weight stays dequantised for longer than its product.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.costs.stage_memory import static_bytes
from hetjax.models.configs import FrozenForm, LlamaConfig
from hetjax.models.decoders import llama_model
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.model import Model, parameter_count, quantised_weights, tensor_sizes
from hetjax.plans.plan import Plan, Remat, Replica, Stage, StageMesh
from hetjax.plans.validation import tensor_problems
from hetjax.runtime.execution.compiled_bytes import temp_bytes
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.models.test_quantised import brute_force
from tests.runtime.fine_tuned import LORA, case_of, merged_gradients, parts, uneven_plan
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    random_batch,
)
from tests.runtime.random_plans import SEQ_LEN
from tests.runtime.test_same_numbers import NODES, Watched, assert_charged
from tests.short_runs import rows_drawn

pytestmark = pytest.mark.usefixtures("quick_compiling")

CONFIG = LlamaConfig(
    name="qlora",
    vocab_size=100,
    hidden_size=16,
    inner_size=128,
    num_blocks=3,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=SEQ_LEN,
    tied=True,
)
BASE = llama_model(CONFIG)


def quantised_model(form: FrozenForm, base: Model = BASE) -> Model:
    return with_adapters(base, replace(LORA, frozen=form))


def first_values(
    seed: int, base: Model = BASE
) -> tuple[dict[str, Any], dict[str, Any]]:
    return parts(with_adapters(base, LORA), seed)


def as_rounded(
    form: FrozenForm, own: dict[str, Any], base: Model = BASE
) -> dict[str, Any]:
    """Return the values of frozen weights after quantisation, by brute force."""
    found = dict(own)
    for spec in quantised_model(form, base).modules:
        for name, weight in quantised_weights(spec).items():
            path = f"{spec.path}.{name}"
            assert weight.num_inputs is not None
            value = brute_force(form, own[path], weight.num_inputs)
            found[path] = value.astype(np.float32)
    return found


def begun(
    plan: Plan, model: Model, own: dict[str, Any], state: dict[str, Any], **given: Any
) -> Watched:
    nodes: dict[str, list[jax.Device]] = dict.fromkeys(NODES, jax.devices())
    optimizer = given.pop("optimizer", keep_gradients())
    weights = lambda path, shape: own[path]  # noqa: E731
    runtime = Watched(plan, model, nodes, optimizer, weights=weights, **given)
    runtime.restore(
        lambda entry: state.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    return runtime


@pytest.mark.parametrize(
    ("form", "remat"), rows_drawn([("int8", "full"), ("nf4", "none")], short=1)
)
def test_losses_and_gradients_are_those_of_one_jit_with_the_rounded_weights(
    form: FrozenForm, remat: Remat
):
    # Seed 0 draws weights for which plain fp32 adapters also differ, by 1.4e-5 to
    # 2.4e-5.
    own, adapters = first_values(7)
    model = quantised_model(form)
    runtime = begun(uneven_plan(model, remat), model, own, adapters)
    batch = random_batch(runtime.plan, BASE.vocab_size, 0)
    result = runtime.step(0, batch)
    loss, expected = merged_gradients(as_rounded(form, own), adapters, batch, BASE)
    exact, _ = merged_gradients(own, adapters, batch, BASE)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert abs(loss - exact) > 1e-4 * exact  # the loss shows the rounding
    assert_gradients_equal(kept_gradients(runtime), expected)
    assert_charged(case_of(model, remat), runtime)


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_what_is_held_is_charged_to_the_byte_and_has_few_bits(form: FrozenForm):
    own, adapters = first_values(1)
    model = quantised_model(form)
    plan = uneven_plan(model)
    runtime = begun(
        plan, model, own, adapters, optimizer=optax.adam(1e-3), dtype="bfloat16"
    )
    for r, s, stage in plan.stages():
        state = runtime.stages[r, s]
        held = [leaf for leaf in jax.tree.leaves(state.frozen)]
        on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in held)
        charged = static_bytes(
            runtime.partition.stages[r, s].kind.stacks,
            stage.mesh,
            "bfloat16",
            optax.adam(1e-3).init,
        )
        assert charged.frozen == on_device
        for own_leaves in state.frozen:
            for leaf, value in own_leaves.items():
                kind = leaf.rpartition(".")[2]
                if kind in ("q", "k", "v", "out", "gate", "up", "down"):
                    assert value.dtype == ("int8" if form == "int8" else "uint8")
                else:
                    is_scales = kind.endswith("_scales")
                    assert value.dtype == ("float32" if is_scales else "bfloat16")
    assert list(map(parameter_count, model.layers)) == list(
        map(parameter_count, with_adapters(BASE, LORA).layers)
    )


def test_saved_state_goes_on_to_the_bit_on_another_plan():
    own, adapters = first_values(2)
    model = quantised_model("nf4")
    first = begun(uneven_plan(model), model, own, adapters, optimizer=optax.adam(1e-2))
    first.step(0, random_batch(first.plan, BASE.vocab_size, 0))
    saved = {entry.name: value for entry, value in first.entries()}
    assert all("_lora_" in name or ".count." in name for name in saved)
    stage = Stage(
        node="even",
        devices=(0, 1),
        mesh=StageMesh(tensor=2),
        layers=(0, 5),
        launch_ahead=1,
    )
    alone = Replica(num_microbatches=3, microbatch_size=2, stages=(stage,))
    plan = replace(first.plan, replicas=(alone,))
    second = begun(plan, model, own, {}, optimizer=optax.adam(1e-2))
    second.restore(lambda entry: saved[entry.name])
    for name, value in ((e.name, v) for e, v in second.entries()):
        np.testing.assert_array_equal(value, saved[name])
    here = dict(frozen_by_path(second))
    there = list(frozen_by_path(first))
    assert {path for path, _ in there} == here.keys()
    for path, value in there:
        np.testing.assert_array_equal(value, here[path])


def frozen_by_path(runtime: StageRuntime) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the frozen arrays of every unit of every stage, by path."""
    for key, state in runtime.stages.items():
        stacks = runtime.partition.stages[key].stacks
        for named, own in zip(stacks, state.frozen, strict=True):
            for leaf, value in own.items():
                of_units = value if named.stack.stacked else value[None]
                for unit, each in enumerate(of_units):
                    yield named.path(leaf, unit), np.asarray(each)


def middle_stage(model: Model, size: int, remat: Remat, tensor: int = 1) -> Any:
    """Return the blocks of a model as a stage between its first and its last layer."""
    last = len(model.layers)
    stages = tuple(
        Stage(
            node="n",
            devices=tuple(range(tensor)),
            mesh=StageMesh(tensor=tensor),
            layers=layers,
            remat=remat,
            launch_ahead=1,
        )
        for layers in [(0, 1), (1, last - 1), (last - 1, last)]
    )
    replica = Replica(num_microbatches=1, microbatch_size=size, stages=stages)
    plan = Plan(model=model.name, seq_len=8, global_batch=size, replicas=(replica,))
    nodes = {"n": jax.devices()}
    runtime = StageRuntime(plan, model, nodes, optax.sgd(0.1), dtype="float32")
    return runtime.stages[0, 1].programs


@pytest.mark.parametrize(
    ("form", "remat"), [("nf4", "none"), ("nf4", "full"), ("int8", "selective")]
)
def test_no_weight_made_whole_is_kept_for_the_backward_or_outlives_its_layer(
    form: FrozenForm, remat: Remat
):
    lora = LoraConfig(rank=2, frozen=form)
    sizes = {"hidden_size": 64, "inner_size": 512, "vocab_size": 128}
    two, eight = (
        with_adapters(
            llama_model(replace(CONFIG, num_blocks=n, tied=False, **sizes)), lora
        )
        for n in (2, 8)
    )
    a_block = 4 * (64 * 512 * 3 + 2 * 64 * 64 + 2 * 64 * 32)  # in fp32
    small, large = (middle_stage(eight, size, remat) for size in (1, 2))
    kept = [
        sum(a.size * a.dtype.itemsize for a in programs.saved)
        for programs in (small, large)
    ]
    assert 2 * kept[0] - kept[1] < 0.02 * 8 * a_block  # bytes kept for zero sequences
    short = middle_stage(two, 1, remat)
    for name in ("forward", "backward"):
        needed = [temp_bytes(getattr(p, name)) for p in (short, small)]
        assert needed[0] is not None and needed[1] is not None
        assert needed[0] < 2.5 * a_block
        assert needed[1] - needed[0] < 0.25 * 6 * a_block


def test_a_cut_that_a_block_would_straddle_is_refused_in_three_parts():
    narrow = llama_model(replace(CONFIG, inner_size=64))
    model = with_adapters(narrow, replace(LORA, frozen="nf4"))
    problems = list(tensor_problems(2, tensor_sizes(model), where="tensor"))
    assert not list(tensor_problems(2, tensor_sizes(narrow), where="tensor"))
    (told,) = map(str, problems)
    assert "'mlp' of size 1" in told  # the scales of 64 inner numbers
    assert "allowed: " in told and "fix: " in told
