# SPDX-License-Identifier: Apache-2.0
"""Lists the all-reduces over the tensor axis in a pass.

A product or sum over a cut dim leaves every device with a partial sum. Sums of partial
sums stay partial. Any other reader needs the whole sum: an all-reduce. Does not own
which dims are cut (`values.py`) nor seconds (`roofline.py`).
"""

import math
from collections.abc import Iterator

from hetjax.costs.graph.values import Cuts, Graph, Operation, Value

_LINEAR = frozenset({"add", "add_any", "sub"})


def all_reduces(graph: Graph, cuts: Cuts) -> list[tuple[int, int]]:
    """List (bytes on one device, number of repeats) of the all-reduces of a pass."""
    if cuts.tensor == 1:
        return []
    return [(cuts.num_bytes(v), times) for v, times in _reduced(graph, cuts, 1)]


def _reduced(graph: Graph, cuts: Cuts, repeats: int) -> Iterator[tuple[Value, int]]:
    parts: dict[int, Value] = {}  # partial sums, one on every device
    for step in graph.steps:
        if step.body is not None:
            yield from _reduced(step.body, cuts, repeats * step.length)
        given = [v for v in step.inputs if id(v) in parts]
        spread = all(id(v) in parts or not v.shape for v in step.inputs)
        if given and step.op in _LINEAR and spread:
            parts |= {id(v): v for v in step.outputs}
        else:
            for value in given:
                yield parts.pop(id(value)), repeats
        if _sums_over_cut(step, cuts):
            parts |= {id(v): v for v in step.outputs}
    read = {id(v) for step in graph.steps for v in step.inputs}
    outputs = {id(v) for v in graph.outputs}
    for identity, value in parts.items():
        if identity in outputs or identity not in read:
            yield value, repeats


def _sums_over_cut(step: Operation, cuts: Cuts) -> bool:
    if step.op == "dot_general":
        (of_lhs, _), _ = step.params["dimension_numbers"]
        return any(cuts.is_cut(step.inputs[0], dim) for dim in of_lhs)
    if step.op.startswith("reduce_") and "axes" in step.params:
        axes = step.params["axes"]
        return any(cuts.is_cut(v, dim) for v in step.inputs for dim in axes)
    if step.op == "gather" and math.prod(step.inputs[0].shape):
        table, mapped = step.inputs[0], step.params["dimension_numbers"].start_index_map
        return any(cuts.is_cut(table, dim) for dim in mapped)
    return False
