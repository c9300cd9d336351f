# SPDX-License-Identifier: Apache-2.0
"""Lists an accelerator's work in a pass: fused kernels, and all-reduces between them.

Matrix products, loops, sorts and scatters read and store whole arrays. Everything
between them, sums included, is one fused kernel per array that one of them reads. From
a sliced array a kernel reads only the slice, and into an array that is updated in place
it writes only the update. A product or sum over a cut dim leaves every device with a
partial sum. Sums of partial sums stay partial. Any other reader needs the whole sum: an
all-reduce over the tensor axis. Does not own the stored values that memory estimates
count (`fusion.py`) nor seconds (`roofline.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetjax.costs.graph.joins import ATTENTION, RAGGED
from hetjax.costs.graph.values import Cuts, Graph, Operation, Origin, Value

_WHOLE = (
    ATTENTION
    | {RAGGED}
    | frozenset(
        "cumsum dot_general gather scan scatter scatter-add sort top_k while".split()
    )
)
_LINEAR = frozenset({"add", "add_any", "sub"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedKernel:
    """One kernel, with the stored values that it reads and writes."""

    step: Operation
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


def fused_kernels(graph: Graph) -> Iterator[FusedKernel]:
    """Yield a graph's fused kernels; the caller treats the bodies of loops."""
    stored = {id(v) for v in graph.outputs}
    for step in graph.steps:
        if step.op in _WHOLE:
            stored |= {id(v) for v in (*step.inputs, *step.outputs)}
    roots: dict[int, tuple[Value, ...]] = {}
    for step in graph.steps:
        if step.op == "dynamic_slice":
            roots[id(step.outputs[0])] = (step.outputs[0],)
            continue
        in_place = step.op == "dynamic_update_slice"  # inputs: an array, an update
        given = step.inputs[1:] if in_place else step.inputs
        reads = {id(r): r for v in given for r in roots.get(id(v), _leaf(v))}
        writes = tuple(
            v for v in step.outputs if id(v) in stored and v.origin > Origin.CONSTANT
        )
        for value in step.outputs:
            roots[id(value)] = (value,) if value in writes else tuple(reads.values())
        if writes or step.op in _WHOLE:
            writes = step.inputs[1:2] if in_place else writes
            yield FusedKernel(step=step, reads=tuple(reads.values()), writes=writes)


def _leaf(value: Value) -> tuple[Value, ...]:
    return () if value.origin is Origin.CONSTANT else (value,)


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
