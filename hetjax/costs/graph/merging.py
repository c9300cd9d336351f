# SPDX-License-Identifier: Apache-2.0
"""Joins products that share a matrix, as XLA for GPUs does.

XLA's pass `DotMerger` joins small products with a common operand: it concatenates their
other operands into a new array, and their output is one array that lives until all its
parts are read. Owns the choice of joined products. Does not own other fusion
(`fusion.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hetjax.costs.graph.values import Cuts, Graph, Operation, Origin, Value

# of a step: its own bit, and those of all steps that must run before it
_Needs = tuple[int, int]
_MOST_BYTES = 32 * 2**20  # of a product's inputs and output on one device: XLA's value


@lru_cache(maxsize=2048)
def merged(graph: Graph, cuts: Cuts) -> Graph:
    """Return the graph with its small products joined, one group after the other."""
    done: set[int] = set()
    while group := next(_groups(graph, cuts, done), None):
        done |= {id(step) for step in group[1]}
        graph = _joined(graph, cuts, *group)
    return graph


def _groups(
    graph: Graph, cuts: Cuts, done: set[int]
) -> Iterator[tuple[int, list[Operation]]]:
    """Yield groups of products that share an operand, with the operand's number.

    Products in `done` are left out. No product of a group depends on another of it.
    """
    alike: dict[Any, list[Operation]] = {}
    for step in graph.steps:
        if step.op == "dot_general" and _is_small(step, cuts) and id(step) not in done:
            for number in (0, 1):
                alike.setdefault(_sharing(step, number), []).append(step)
    needs = _needs(graph)
    for (_, number, *_), steps in alike.items():
        group: list[Operation] = []
        for step in steps:
            if all(_are_apart(step, other, needs) for other in group):
                group.append(step)
        if len(group) > 1:
            yield number, group


def _is_small(step: Operation, cuts: Cuts) -> bool:
    return (
        step.outputs[0].origin > Origin.CONSTANT
        and sum(map(cuts.num_bytes, (*step.inputs, *step.outputs))) <= _MOST_BYTES
    )


def _sharing(step: Operation, number: int) -> tuple[Any, ...]:
    """Return the key that products must have in common to be joined."""
    contracted, batch = step.params["dimension_numbers"]
    dims = tuple(contracted[number]), tuple(batch[number])
    return id(step.inputs[number]), number, *dims, step.outputs[0].dtype


def _needs(graph: Graph) -> dict[int, _Needs]:
    """Return what each step needs. Sets take a hundred times as long as bits."""
    made: dict[int, int] = {}  # by value, its maker's bit and those that this needs
    needs: dict[int, _Needs] = {}
    for n, step in enumerate(graph.steps):
        own, before = 1 << n, 0
        for value in (*step.inputs, *step.after):
            before |= made.get(id(value), 0)
        needs[id(step)] = own, before
        made |= {id(v): own | before for v in step.outputs}
    return needs


def _are_apart(a: Operation, b: Operation, needs: dict[int, _Needs]) -> bool:
    (own, before), (other, before_other) = needs[id(a)], needs[id(b)]
    return not (own & before_other or other & before)


def _joined(graph: Graph, cuts: Cuts, number: int, group: Sequence[Operation]) -> Graph:
    """Return the graph with one product in place of a group."""
    shared, others = group[0].inputs[number], [s.inputs[1 - number] for s in group]
    contracted, batch = (dims[number] for dims in group[0].params["dimension_numbers"])
    shape = cuts.shape(shared)
    fixed = (
        *(shape[dim] for dim in batch),
        math.prod(shape[dim] for dim in contracted),
    )
    wide = _num_elements(others, cuts) // math.prod(fixed)
    side = _array(cuts, others[0], (*fixed, wide))
    made = [step.outputs[0] for step in group]
    whole = _array(cuts, made[0], (_num_elements(made, cuts),))
    own = contracted, batch
    beside = (len(batch),), tuple(range(len(batch)))
    numbers = zip(*((own, beside) if number == 0 else (beside, own)), strict=True)
    product = Operation(
        op="dot_general",
        params={"dimension_numbers": tuple(numbers)},
        inputs=(shared, side) if number == 0 else (side, shared),
        outputs=(whole,),
        after=tuple(v for step in group for v in step.after),
    )
    parts = [_step("slice", (whole,), step.outputs) for step in group]
    new = [_step("concatenate", tuple(others), (side,)), product, *parts]
    left = [s for s in graph.steps if not any(s is step for step in group)]
    return replace(graph, steps=in_order([*left, *new]))


def _step(op: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Operation:
    return Operation(op=op, params={}, inputs=inputs, outputs=outputs)


def _num_elements(values: Sequence[Value], cuts: Cuts) -> int:
    return sum(math.prod(cuts.shape(value)) for value in values)


def _array(cuts: Cuts, like: Value, shape: tuple[int, ...]) -> Value:
    """Return a new array of this shape on every device."""
    return Value(
        shape=shape,
        dtype=like.dtype,
        classes=tuple(cuts.dims.fresh() for _ in shape),
        origin=Origin.BATCH,
    )


def in_order(steps: list[Operation]) -> tuple[Operation, ...]:
    """Return the steps, each after the makers of the values that it reads."""
    missing = {id(v) for step in steps for v in step.outputs}
    ordered: list[Operation] = []
    while steps:
        waiting = []
        for step in steps:
            if any(id(v) in missing for v in (*step.inputs, *step.after)):
                waiting.append(step)
                continue
            ordered.append(step)
            missing -= {id(v) for v in step.outputs}
        steps = waiting
    return tuple(ordered)
