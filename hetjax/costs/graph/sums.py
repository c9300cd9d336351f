# SPDX-License-Identifier: Apache-2.0
"""Fuses sums and maxima with the operations around them, as XLA's CPU backend does.

Its library of kernels (YNN) runs a reduction together with the elementwise operations
around it, such as whole norms and softmaxes. Upwards it includes operations, even
products, whose results nothing else reads; downwards a result's only reader. Such a
kernel stores only its last output, and reads arrays in their full shape: a scale that a
norm and its derivative share is stored once per row.

Owns these kernels. Does not own other fusion (`fusion.py`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetjax.costs.graph.values import Cuts, Graph, Operation, Origin, Value

REDUCTION = "reduction"  # with everything that is fused with it
_BINARY = frozenset("add add_any div max min mul sub".split())
# The operations that the library has.
_FUSED = _BINARY | frozenset(
    "broadcast broadcast_in_dim convert_element_type dot_general exp integer_pow neg "
    "reduce_max reduce_sum reshape rsqrt sqrt square squeeze stop_gradient".split()
)
_FEWEST = 4096  # elements from which the library takes an elementwise operation


def sums(step: Operation) -> bool:
    """Return whether the step reduces a dim; a dim of size 1 is only dropped."""
    if not step.op.startswith("reduce_") or "axes" not in step.params:
        return False
    return math.prod(step.inputs[0].shape) > math.prod(step.outputs[0].shape)


def reduced(graph: Graph, cuts: Cuts) -> Graph:
    """Return the graph with one step per reduction and the operations fused with it."""
    graph = _in_full(graph)
    around = _Around.from_graph(graph, cuts)
    done: set[int] = set()
    kernels: dict[int, Operation] = {}  # in place of their last steps
    for step in reversed(graph.steps):
        varies = all(v.origin > Origin.CONSTANT for v in step.outputs)
        if sums(step) and varies and id(step) not in done:
            fused = _fused_with(step, around, done)
            done |= {id(one) for one in fused}
            kernels[id(fused[-1])] = _as_one(fused)
    steps = [
        kernels.get(id(step), step)
        for step in graph.steps
        if id(step) in kernels or id(step) not in done
    ]
    return replace(graph, steps=tuple(steps))


def _in_full(graph: Graph) -> Graph:
    """Return the graph with a step for each array that others read in a larger shape.

    Transposes that only move dims of size 1 become reshapes.
    """
    larger: dict[Any, Value] = {}
    steps: list[Operation] = []
    for step in graph.steps:
        if step.op in _BINARY:
            inputs = list(step.inputs)
            for at, value in enumerate(inputs):
                key = _larger(value, step, at)
                if key is None:
                    continue
                if key not in larger:
                    larger[key] = _like(value, step.outputs[0])
                    steps.append(_step("broadcast", (value,), (larger[key],)))
                inputs[at] = larger[key]
            step = _reading(step, inputs)
        elif step.op == "transpose" and in_place(
            step.inputs[0], step.params["permutation"]
        ):
            step = _step("reshape", step.inputs, step.outputs)
        steps.append(step)
    return replace(graph, steps=tuple(steps))


def _reading(step: Operation, inputs: Sequence[Value]) -> Operation:
    if all(a is b for a, b in zip(step.inputs, inputs, strict=True)):
        return step
    return replace(step, inputs=tuple(inputs))


def _larger(value: Value, step: Operation, at: int) -> Any:
    """Return the key of the larger array that a step needs for its input, or None.

    XLA turns a division into a product with an inverse, which nothing else reads.
    """
    shape = step.outputs[0].shape
    if value.origin is Origin.CONSTANT or not value.shape or value.shape == shape:
        return None
    inverse = step.op == "div" and at == 1
    return id(value), shape, id(step.outputs[0]) if inverse else None


def _like(value: Value, other: Value) -> Value:
    return replace(value, shape=other.shape, classes=other.classes)


def _step(op: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Operation:
    return Operation(op=op, params={}, inputs=inputs, outputs=outputs)


def in_place(value: Value, order: Sequence[int]) -> bool:
    """Return whether an array has its dims in that order, except those of size 1."""
    long = [dim for dim in order if value.shape[dim] > 1]
    return long == sorted(long)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """The maker and the readers of each value, by identity; a graph's `outputs` are
    always stored."""

    makers: Mapping[int, Operation]
    readers: Mapping[int, list[Operation]]
    outputs: Collection[int]
    cuts: Cuts

    @classmethod
    def from_graph(cls, graph: Graph, cuts: Cuts) -> "_Around":
        makers = {id(v): step for step in graph.steps for v in step.outputs}
        readers: dict[int, list[Operation]] = {}
        for step in graph.steps:
            for value in step.inputs:
                readers.setdefault(id(value), []).append(step)
        outputs = {id(v) for v in graph.outputs}
        return cls(makers=makers, readers=readers, outputs=outputs, cuts=cuts)

    def can_fuse(self, step: Operation) -> bool:
        """Return whether the library has the step and takes one of its size."""
        if step.op not in _FUSED:
            return False
        if step.op == "dot_general" or sums(step):
            return True
        return all(math.prod(self.cuts.shape(v)) >= _FEWEST for v in step.outputs)


def _fused_with(
    seed: Operation, around: _Around, done: Collection[int]
) -> list[Operation]:
    """Return the steps of a reduction's kernel; the one that runs last comes last."""
    fused: dict[int, Operation] = {}
    last, below = seed, seed
    while below is not None:
        last = below
        left = [last]
        while left:
            step = left.pop()
            fused[id(step)] = step
            left += [
                maker
                for value in step.inputs
                if (maker := around.makers.get(id(value))) is not None
                and id(maker) not in done
                and _is_read_in(fused, maker, around)
            ]
        below = _alone_reading(last, around, done)
    del fused[id(last)]
    return [*fused.values(), last]


def _is_read_in(
    fused: Mapping[int, Operation], maker: Operation, around: _Around
) -> bool:
    """Return whether a step can be fused: `fused` has all readers of its outputs."""
    return around.can_fuse(maker) and all(
        id(v) not in around.outputs and id(reader) in fused
        for v in maker.outputs
        for reader in around.readers[id(v)]
    )


def _alone_reading(
    last: Operation, around: _Around, done: Collection[int]
) -> Operation | None:
    """Return the only step that reads a kernel's output, if it can join the kernel."""
    (made,) = last.outputs
    readers = {id(step): step for step in around.readers.get(id(made), [])}
    if len(readers) != 1 or id(made) in around.outputs:
        return None
    (reader,) = readers.values()
    return reader if around.can_fuse(reader) and id(reader) not in done else None


def _as_one(steps: list[Operation]) -> Operation:
    """Return the steps as one kernel, which reads what none of its steps makes."""
    made = {id(v) for step in steps for v in step.outputs}
    read = {
        (id(value), order): (value, order)
        for step in steps
        for value, order in _read(step)
        if id(value) not in made
    }
    return Operation(
        op=REDUCTION,
        params={"orders": tuple(order for _, order in read.values())},
        inputs=tuple(value for value, _ in read.values()),
        outputs=steps[-1].outputs,
        after=tuple(v for step in steps for v in step.after if id(v) not in made),
    )


def _read(step: Operation) -> list[tuple[Value, tuple[int, ...]]]:
    """Return a step's inputs, each with the order in which the step reads its dims."""
    if step.op == "dot_general":
        return list(zip(step.inputs, operand_orders(step), strict=True))
    return [(value, tuple(range(len(value.shape)))) for value in step.inputs]


def operand_orders(step: Operation) -> list[tuple[int, ...]]:
    """Return the dims of both operands of a product, in the order of reading."""
    (contracted, batch), orders = step.params["dimension_numbers"], []
    for number, value in enumerate(step.inputs):
        bound = (*contracted[number], *batch[number])
        free = tuple(dim for dim in range(len(value.shape)) if dim not in bound)
        inner = (free, contracted[number])[:: 1 if number == 0 else -1]
        orders.append((*batch[number], *inner[0], *inner[1]))
    return orders
