# SPDX-License-Identifier: Apache-2.0
"""What a pass reads and writes in memory when all between two products is fused.

Owns the accelerator's view of a graph: matrix products, loops, sorts and scatters read
and store whole arrays; everything between them, sums included, is one fused kernel per
array that one of them reads. Does not own what a compiler for CPUs stores
(`liveness.py`) nor seconds (`roofline.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hetjax.costs.graph.values import Graph, Origin, Step, Value

_WHOLE = frozenset(
    {
        "cumsum",
        "dot_general",
        "gather",
        "scan",
        "scatter",
        "scatter-add",
        "sort",
        "top_k",
        "while",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """One kernel, the stored values that it reads and those that it writes."""

    step: Step
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


def moved(graph: Graph) -> Iterator[Moved]:
    """Fuse a graph between its products; bodies of loops are left to the caller."""
    stored = {id(v) for v in graph.outputs}
    for step in graph.steps:
        if step.op in _WHOLE:
            stored |= {id(v) for v in (*step.inputs, *step.outputs)}
    roots: dict[int, tuple[Value, ...]] = {}
    for step in graph.steps:
        reads = {id(r): r for v in step.inputs for r in roots.get(id(v), _leaf(v))}
        writes = tuple(
            v for v in step.outputs if id(v) in stored and v.origin > Origin.CONSTANT
        )
        for value in step.outputs:
            roots[id(value)] = (value,) if value in writes else tuple(reads.values())
        if writes or step.op in _WHOLE:
            yield Moved(step=step, reads=tuple(reads.values()), writes=writes)


def _leaf(value: Value) -> tuple[Value, ...]:
    return () if value.origin is Origin.CONSTANT else (value,)
