# SPDX-License-Identifier: Apache-2.0
"""What W needs after I: the operands of the products that make weight gradients.

Owns the estimate of a backward pass cut in two: W is the last matrix product before
each weight gradient (layouts aside), I all the rest. Sums over tokens are I's. Does not
own the cut that the runtime makes of its programs.
"""

from collections.abc import Iterator

from hetjax.costs.graph import Cuts, Graph, Origin, Step, Value
from hetjax.costs.passes import Passes

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "scatter-add"})
_LAYOUTS = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "iota",
        "reshape",
        "squeeze",
        "transpose",
    }
)
_SUMS = frozenset({"add", "add_any"})  # of the gradients of several uses


def weight_products(passes: Passes) -> tuple[list[tuple[Step, int]], list[Value]]:
    """Give the products that make weight gradients, with how often each runs, and the
    gradients that no product makes."""
    products: dict[int, tuple[Step, int]] = {}
    others: list[Value] = []
    for gradient in passes.backward.outputs[: len(passes.weights)]:
        found = list(_last_products(passes.backward, gradient, 1))
        products |= {id(step): (step, repeats) for step, repeats in found}
        others += [] if found else [gradient]
    return list(products.values()), others


def half_bytes(passes: Passes) -> int:
    """Estimate the bytes on a device of what lives between I and W of a microbatch."""
    products, others = weight_products(passes)
    makers = _makers(passes.backward)
    weights = {id(v) for v in passes.weights}
    needed: dict[int, int] = {}
    for step, repeats in products:
        for value in step.inputs:
            source = _before_layouts(value, makers, passes.cuts)
            if source.origin > Origin.CONSTANT and id(source) not in weights:
                needed[id(source)] = repeats * passes.cuts.num_bytes(source)
    return sum(needed.values()) + sum(passes.cuts.num_bytes(v) for v in others)


def _last_products(
    graph: Graph, value: Value, repeats: int
) -> Iterator[tuple[Step, int]]:
    makers = {id(v): step for step in graph.steps for v in step.outputs}
    step = makers.get(id(value))
    if step is None or value.origin is Origin.CONSTANT:
        return
    if step.op in PRODUCTS:
        yield step, repeats
    elif step.body is not None:
        at = next(i for i, v in enumerate(step.outputs) if v is value)
        if at >= step.params["num_carry"]:
            yield from _last_products(
                step.body, step.body.outputs[at], repeats * step.length
            )
    elif step.op in _LAYOUTS | _SUMS:
        for source in step.inputs:
            yield from _last_products(graph, source, repeats)


def _makers(graph: Graph) -> dict[int, Step]:
    found: dict[int, Step] = {}
    for step in graph.steps:
        found |= {id(v): step for v in step.outputs}
        if step.body is not None:
            found |= _makers(step.body)
    return found


def _before_layouts(value: Value, makers: dict[int, Step], cuts: Cuts) -> Value:
    step = makers.get(id(value))
    while step is not None and step.op in _LAYOUTS and step.inputs:
        source = step.inputs[0]
        if cuts.num_bytes(source) > cuts.num_bytes(value):
            break
        value, step = source, makers.get(id(source))
    return value
