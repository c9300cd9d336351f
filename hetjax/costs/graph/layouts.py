# SPDX-License-Identifier: Apache-2.0
"""In which order of dims an accelerator reads stacks, and what it copies for that.

Owns the stacks of which a loop is given a copy in another layout, and the arrays that
fill whole lanes. Does not own what one product reads (`fusion.py`) nor what lives at
once (`liveness.py`).
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

_DimOrder = tuple[int, ...] | None  # as a product reads them
_OTHER: _DimOrder = None  # than the value's own, whatever it is
_LANES = 128  # of a TPU's registers


def in_lanes(cuts: Cuts, loop: Operation, backend: Backend) -> Cuts:
    """How a loop's arrays lie: heads that a TPU's kernel of attention reads fill whole
    lanes, others have another dim last."""
    assert loop.body is not None
    has_kernel = any(step.op in ATTENTION for step in loop.body.steps)
    return replace(cuts, lanes=_LANES) if backend == "tpu" and has_kernel else cuts


@lru_cache(maxsize=1024)
def turned_stacks(loop: Operation, backend: Backend) -> tuple[Value, ...]:
    """Stacks of heads (batch, positions, heads, size) whose slices a product reads in
    another order: the whole stack is copied into it."""
    assert loop.body is not None
    turned = _read_turned(loop.body, backend)
    return tuple(
        stack
        for stack, given in _stacks_and_slices(loop)
        if id(given) in turned and len(given.shape) > 3
    )


@lru_cache(maxsize=1024)
def gated_stacks(loop: Operation) -> tuple[Value, ...]:
    """Stacks of (batch, positions, width) whose slices are multiplied by one another
    element by element, as in a gated MLP: programs for v6e that make the gradient of an
    input alone were seen to have positions last there, and to copy whole stacks."""
    assert loop.body is not None
    pairs = _stacks_and_slices(loop)
    gated = _multiplied(loop.body, [given for _, given in pairs])
    return tuple(stack for stack, given in pairs if id(given) in gated)


def _stacks_and_slices(loop: Operation) -> list[tuple[Value, Value]]:
    """What a loop slices, each with the slice that its body is given."""
    assert loop.body is not None
    begin = loop.num_consts + loop.num_carry
    return list(zip(loop.inputs[begin:], loop.body.inputs[begin:], strict=True))


def _multiplied(graph: Graph, slices: Sequence[Value]) -> set[int]:
    """Those of the slices of which one's elements are multiplied by another's, both
    through whatever is element by element and keeps their shape.

    Where both factors are of one slice it is no gate, but the derivative of a norm.
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
    """Inputs of a graph that reach a product of batches which reads them in another
    order, through nothing but operations element by element, transposes among them."""
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
    """What a step reads as a product of batches, and in which order of dims.

    A TPU's kernel of attention reads (batch, heads, positions, size).
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
    """The inputs of a step element by element in the order in which its output is read;
    where it gives another shape, those of one that is turned are."""
    if maker.op == "transpose" and order is not None:
        return [before_transpose(maker, order)]
    alike = [v for v in maker.inputs if v.shape == value.shape]
    others = [v for v in maker.inputs if v.shape != value.shape and len(v.shape) > 2]
    turned = others if _is_turned(value, order) else []
    return [(v, order) for v in alike] + [(v, _OTHER) for v in turned]


def _is_turned(value: Value, order: _DimOrder) -> bool:
    return order is None or not in_place(value, order)
