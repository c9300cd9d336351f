# SPDX-License-Identifier: Apache-2.0
"""A stage's graphs have the sizes that JAX traces for that stage, although stages that
differ only in numbers of units share a trace."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.cluster.catalogue import catalogue
from hetjax.costs.graph.passes import (
    Shares,
    _passes_of,  # pyright: ignore[reportPrivateUsage]
    passes,
    split_passes,
)
from hetjax.costs.graph.values import Graph
from hetjax.costs.roofline import pass_times, ring_hop
from hetjax.costs.stage_memory import residual_bytes
from hetjax.costs.workspace import workspace_bytes
from hetjax.plans.plan import Remat
from hetjax.stage.backward_split import split_backward
from hetjax.stage.function import (
    Residuals,
    StageFunction,
    rank_forward,
    rank_gradients,
)
from hetjax.stage.jaxprs import Jaxpr, called
from hetjax.stage.partition import StageStacks, stage_stacks
from tests.costs.small_models import SEQ_LEN, WIDTH, family

Sizes = Counter[tuple[str, tuple[tuple[int, ...], ...]]]
_SUMS = {"reduce_sum", "reshape", "squeeze", "broadcast_in_dim"}


@st.composite
def stages(draw: st.DrawFn) -> StageStacks:
    """Draw stages of any part of a model: up to three segments of up to forty units."""
    cuts = draw(st.sets(st.integers(0, 6), min_size=2, max_size=4))
    ranges = list(zip(sorted(cuts), sorted(cuts)[1:], strict=False))
    stage = stage_stacks(family(draw(st.sampled_from(["gpt", "llama", "moe"]))), ranges)
    stacks = tuple(
        replace(stack, num_units=draw(st.integers(2, 40))) if stack.stacked else stack
        for stack in stage.stacks
    )
    return replace(stage, stacks=stacks)


def shares(batch: int, seq_len: int = SEQ_LEN) -> Shares:
    return Shares(
        num_sequences=batch,
        seq_len=seq_len,
        hidden_size=WIDTH,
        dtype="float32",
        tensor=1,
    )


def arguments(stage: StageStacks, batch: int, seq_len: int) -> tuple[Any, ...]:
    params = tuple(
        {
            leaf: jax.ShapeDtypeStruct(stack.shape(param), jnp.float32)
            for leaf, param in stack.leaves().items()
        }
        for stack in stage.stacks
    )
    tokens = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)
    x = jax.ShapeDtypeStruct((batch, seq_len, WIDTH), jnp.float32)
    return params, tokens if stage.first else x, *([tokens] if stage.last else [])


def traced_sizes(jaxpr: Jaxpr) -> Sizes:
    """Return the sizes of all operations' outputs, including those in loops."""
    found: Sizes = Counter()
    for eqn in jaxpr.eqns:
        inner = called(eqn.params)
        if inner is not None:
            found += traced_sizes(inner[0])
        if inner is None or eqn.primitive.name == "scan":
            avals: list[Any] = [var.aval for var in eqn.outvars]
            shapes = tuple(tuple(aval.shape) for aval in avals)
            found[eqn.primitive.name, shapes] += 1
    return found


def graph_sizes(graph: Graph) -> Sizes:
    found: Sizes = Counter()
    for step in graph.steps:
        found[step.op, tuple(value.shape for value in step.outputs)] += 1
        found += graph_sizes(step.body) if step.body is not None else Counter()
    return found


def without(dropped: Collection[str], sizes: Sizes) -> Sizes:
    return Counter({key: n for key, n in sizes.items() if key[0] not in dropped})


def lengths(graph: Graph) -> list[int]:
    return [step.length for step in graph.steps if step.op == "scan"]


@settings(max_examples=15, deadline=None)
@given(stages(), st.sampled_from(get_args(Remat)), st.integers(1, 3))
def test_graphs_have_the_sizes_of_the_stage_itself(
    stage: StageStacks, remat: Remat, batch: int
):
    given, residuals = arguments(stage, batch, SEQ_LEN), Residuals()
    function = partial(rank_forward, StageFunction(stage, remat), residuals)
    forward, (y, saved) = jax.make_jaxpr(function, return_shape=True)(*given)
    gradients = partial(rank_gradients, residuals)
    backward = jax.make_jaxpr(gradients)(*given[:2], saved, y)
    found = passes(stage, shares(batch), remat)
    # with blocks alone, sums over one sequence are traced as if over several
    dropped = _SUMS if batch == 1 and not (stage.first or stage.last) else ()
    for graph, jaxpr in (
        (found.forward, forward.jaxpr),
        (found.backward, backward.jaxpr),
    ):
        sizes, traced = graph_sizes(graph), traced_sizes(jaxpr)
        assert without(dropped, sizes) == without(dropped, traced)
    units = [stack.num_units for stack in stage.stacks if stack.stacked]
    assert lengths(found.forward) == units
    assert lengths(found.backward) == units[::-1]
    assert [v.shape for v in found.saved] == [s.shape for s in saved]


@settings(max_examples=6, deadline=None)
@given(stages(), st.sampled_from(get_args(Remat)), st.integers(1, 2))
def test_halves_have_the_sizes_of_the_stage_itself(
    stage: StageStacks, remat: Remat, batch: int
):
    given, residuals = arguments(stage, batch, SEQ_LEN), Residuals()
    function = partial(rank_forward, StageFunction(stage, remat), residuals)
    y, saved = jax.eval_shape(function, *given)
    leaves, tree = jax.tree.flatten((*given[:2], saved, y))

    def gradients(*leaves: Any) -> list[Any]:
        made = rank_gradients(residuals, *jax.tree.unflatten(tree, leaves))
        return jax.tree.leaves((made[1:] or (jnp.zeros(()),), made[0]))

    split = split_backward(gradients, 1, leaves)
    first, made = jax.make_jaxpr(split.first, return_shape=True)(*leaves)
    second = jax.make_jaxpr(split.second)([leaves[i] for i in split.kept], made[1])
    found = split_passes(stage, shares(batch), remat)
    assert graph_sizes(found.input_gradient) == traced_sizes(first.jaxpr)
    assert graph_sizes(found.weight_gradient) == traced_sizes(second.jaxpr)
    assert [v.shape for v in found.kept] == [leaves[i].shape for i in split.kept]


@pytest.mark.parametrize("name", ["gpt", "llama", "adapted", "moe"])
@pytest.mark.parametrize("remat", get_args(Remat))
def test_blocks_of_one_sequence_cost_what_their_own_trace_says(name: str, remat: Remat):
    """One sequence does not share a trace with several sequences."""
    held = stage_stacks(family(name), [(1, 4)])
    shared, own = passes(held, shares(1), remat), _passes_of(held, shares(1), remat)
    device = catalogue()["A100-SXM4-80GB"]
    found = [
        (
            pass_times(traced, device, "float32", ring_hop(device)),
            [workspace_bytes(traced, 2, name) for name in ("cpu", "gpu", "tpu")],
            residual_bytes(traced, 2),
        )
        for traced in (shared, own)
    ]
    assert found[0] == found[1]


def test_loops_of_stages_with_other_numbers_of_units_share_their_bodies():
    """So facts about a body are computed once."""
    longer = [stage_stacks(family("llama"), [(1, end)]) for end in (3, 4)]
    graphs = [passes(stage, shares(2), "none").forward for stage in longer]
    assert [lengths(graph) for graph in graphs] == [[2], [3]]
    first, second = ([s.body for s in g.steps if s.body] for g in graphs)
    assert first[0] is second[0]


def test_a_size_that_stands_for_no_units_stays():
    """The sequence length equals the first prime that stands for units in traces."""
    stage = stage_stacks(family("llama"), [(1, 5)])
    found = passes(stage, shares(1, seq_len=1_000_003), "full")
    assert found.forward.outputs[0].shape == (1, 1_000_003, WIDTH)
    assert lengths(found.forward) == [4]
