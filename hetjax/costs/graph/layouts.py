# SPDX-License-Identifier: Apache-2.0
"""Determines in which order of dims accelerators read stacks, and the copies for it.

Owns the choice of stacks that a loop gets as a copy in another layout, and of arrays
that fill whole lanes. Does not own what one product reads (`fusion.py`) nor what is
live at once (`liveness.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from hetjax.cluster.catalogue import Backend
from hetjax.costs.graph.fusion import (
    before_transpose,
    gathers,
    identities,
    read_by_devices,
)
from hetjax.costs.graph.joins import ATTENTION
from hetjax.costs.graph.sums import in_place
from hetjax.costs.graph.values import Cuts, Graph, Operation, Value

_DimOrder = tuple[int, ...] | None  # in which a product reads dims
_OTHER: _DimOrder = None  # any order except the value's own
_LANES = 128  # of a TPU's registers


def in_lanes(cuts: Cuts, loop: Operation, backend: Backend) -> Cuts:
    """Return `cuts` with the lanes of a loop's arrays: heads fill whole lanes if a
    TPU's attention kernel reads them; otherwise another dim is last."""
    assert loop.body is not None
    has_kernel = any(step.op in ATTENTION for step in loop.body.steps)
    return replace(cuts, lanes=_LANES) if backend == "tpu" and has_kernel else cuts


@lru_cache(maxsize=1024)
def turned_stacks(loop: Operation, backend: Backend) -> tuple[Value, ...]:
    """Return the stacks of heads (batch, positions, heads, size) whose slices a product
    reads in another order: the whole stack is copied into that order."""
    assert loop.body is not None
    turned = _read_turned(loop.body, backend)
    return tuple(
        stack
        for stack, given in _stacks_and_slices(loop)
        if id(given) in turned and len(given.shape) > 3
    )


@lru_cache(maxsize=1024)
def gated_stacks(loop: Operation) -> tuple[Value, ...]:
    """Return the stacks of (batch, positions, width) whose slices are multiplied with
    each other elementwise, as in a gated MLP. Programs for v6e that only make an
    input's gradient were seen to store positions last there, and to copy whole stacks.
    """
    assert loop.body is not None
    pairs = _stacks_and_slices(loop)
    gated = _multiplied(loop.body, [given for _, given in pairs])
    return tuple(stack for stack, given in pairs if id(given) in gated)


def _stacks_and_slices(loop: Operation) -> list[tuple[Value, Value]]:
    """Return the arrays that a loop slices, each with the slice that its body gets."""
    assert loop.body is not None
    begin = loop.num_consts + loop.num_carry
    return list(zip(loop.inputs[begin:], loop.body.inputs[begin:], strict=True))


def _multiplied(graph: Graph, slices: Sequence[Value]) -> set[int]:
    """Return the slices that are multiplied elementwise with another slice, directly or
    after elementwise operations that keep their shape.

    If both factors depend on one slice, the product is no gate but a norm's derivative.
    """
    found: set[int] = set()
    made_of = {id(v): frozenset((id(v),)) for v in slices if len(v.shape) == 3}
    for step in graph.steps:
        if step.body is not None or gathers(step):
            continue
        for made in step.outputs:
            alike = [v for v in step.inputs if v.shape == made.shape]
            of_each = [made_of.get(id(v), frozenset()) for v in alike]
            made_of[id(made)] = frozenset().union(*of_each)
            if step.op == "mul" and len(of_each) == 2:
                one, other = of_each
                found |= one | other if one and other and not one & other else set()
    return found


def _read_turned(graph: Graph, backend: Backend) -> frozenset[int]:
    """Return the inputs of a graph that a batched product reads in another order, with
    only elementwise operations and transposes between input and product."""
    makers = {id(v): step for step in graph.steps for v in step.outputs}
    left = [p for step in graph.steps for p in _read_in_order(step, makers, backend)]
    inputs, seen, turned = identities(graph.inputs), set(), set()
    while left:
        value, order = left.pop()
        if (id(value), order) in seen:
            continue
        seen.add((id(value), order))
        if id(value) in inputs and _is_turned(value, order):
            turned.add(id(value))
        maker = makers.get(id(value))
        if maker and not gathers(maker):
            left += _on_the_way(maker, value, order)
    return frozenset(turned)


def _read_in_order(
    step: Operation, makers: Mapping[int, Operation], backend: Backend
) -> list[tuple[Value, _DimOrder]]:
    """Return what a step reads as a batched product, and in which order of dims.

    A TPU's attention kernel reads (batch, heads, positions, size).
    """
    if step.body is not None:
        turned = _read_turned(step.body, backend)
        pairs = zip(step.inputs, step.body.inputs, strict=True)
        return [(value, _OTHER) for value, given in pairs if id(given) in turned]
    if step.op in ATTENTION and backend == "tpu":
        return [(value, _OTHER) for value in step.inputs if len(value.shape) > 3]
    if step.op != "dot_general" or not step.params["dimension_numbers"][1][0]:
        return []
    return list(read_by_devices(step, makers))


def _on_the_way(
    maker: Operation, value: Value, order: _DimOrder
) -> list[tuple[Value, _DimOrder]]:
    """Return an elementwise step's inputs, in the order in which its output is read.

    Inputs of another shape are turned if the output is.
    """
    if maker.op == "transpose" and order is not None:
        return [before_transpose(maker, order)]
    alike = [v for v in maker.inputs if v.shape == value.shape]
    others = [v for v in maker.inputs if v.shape != value.shape and len(v.shape) > 2]
    turned = others if _is_turned(value, order) else []
    return [(v, order) for v in alike] + [(v, _OTHER) for v in turned]


def _is_turned(value: Value, order: _DimOrder) -> bool:
    return order is None or not in_place(value, order)
