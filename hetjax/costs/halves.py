# SPDX-License-Identifier: Apache-2.0
"""A backward pass cut in two: W makes the products for the weights, I all the rest.

Owns the estimate of the cut: W is the last matrix product before each weight gradient
(layouts and sums aside), and needs its operands of I. Sums over tokens are I's. A loop
is cut inside, with stacks between its halves. Does not own the cut that the runtime
makes of its programs.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetjax.costs.graph import Cuts, Dims, Graph, Origin, Step, Value
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
    operands, others = _operands(passes)
    kept = sum(
        repeats * passes.cuts.num_bytes(value) for value, repeats in operands.values()
    )
    return kept + sum(passes.cuts.num_bytes(v) for v in others)


def halves(passes: Passes) -> tuple[Graph, Graph]:
    """Cut the backward pass in I, whose outputs are the input's gradient and all that W
    needs of it, and W, whose outputs are the weight gradients that are products."""
    backward, num_weights = passes.backward, len(passes.weights)
    products, others = weight_products(passes)
    cut = _Cut(
        late=frozenset(id(step) for step, _ in products),
        operands=frozenset(_operands(passes)[0]),
        dims=passes.cuts.dims,
    )
    gradients = backward.outputs[:num_weights]
    early = _early(backward, (*backward.outputs[num_weights:], *others), cut)
    mine = {id(v) for v in others}
    late = _late(backward, [v for v in gradients if id(v) not in mine], cut)
    return early, late


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Which steps are W's, and which values cross, all by identity.

    `stacks` are those of the values that cross in every iteration of a loop.
    """

    late: frozenset[int]
    operands: frozenset[int]
    dims: Dims
    stacks: dict[int, Value] = field(default_factory=dict)

    def crosses(self, value: Value) -> bool:
        return id(value) in self.operands

    def stacked(self, value: Value, length: int) -> Value:
        """The stack of a value, one over all iterations."""
        shape, classes = (length, *value.shape), (self.dims.fresh(), *value.classes)
        self.stacks[id(value)] = replace(value, shape=shape, classes=classes)
        return self.stacks[id(value)]


def _early(
    graph: Graph, outputs: Sequence[Value], cut: _Cut, carry: Sequence[Value] = ()
) -> Graph:
    """The steps that the outputs or W need; what crosses becomes an output too."""
    wanted, steps = {id(v) for v in outputs}, []
    crossing = [v for v in carry if cut.crosses(v)]
    for step in reversed(graph.steps):
        stacks: tuple[Value, ...] = ()
        if step.body is not None:
            step, stacks = _early_loop(step, wanted, cut)
        needed = [v for v in step.outputs if id(v) in wanted or cut.crosses(v)]
        if id(step) in cut.late or not (needed or stacks):
            continue
        crossing += [*stacks, *(v for v in step.outputs if cut.crosses(v))]
        wanted |= {id(v) for v in step.inputs}
        steps.append(step)
    return Graph(
        inputs=graph.inputs,
        outputs=_once((*outputs, *crossing)),
        steps=tuple(steps[::-1]),
    )


def _early_loop(
    step: Step, wanted: Collection[int], cut: _Cut
) -> tuple[Step, tuple[Value, ...]]:
    """The loop with the outputs that are wanted, and stacks of what crosses."""
    assert step.body is not None
    num_consts, num_carry = step.num_consts, step.num_carry
    pairs = list(zip(step.outputs, step.body.outputs, strict=True))
    kept = pairs[:num_carry] + [p for p in pairs[num_carry:] if id(p[0]) in wanted]
    carry = step.body.inputs[num_consts : num_consts + num_carry]
    body = _early(step.body, [inner for _, inner in kept], cut, carry)
    crossing = body.outputs[len(_once([inner for _, inner in kept])) :]
    stacks = tuple(cut.stacked(value, step.length) for value in crossing)
    # the loop's outputs are one by one the body's, which may give a value twice
    body = replace(body, outputs=(*(inner for _, inner in kept), *crossing))
    outputs = (*(outer for outer, _ in kept), *stacks)
    return _reading(replace(step, outputs=outputs, body=body)), stacks


def _late(graph: Graph, outputs: Sequence[Value], cut: _Cut) -> Graph:
    """The products that the outputs need, and layouts and sums around them."""
    wanted, steps = {id(v) for v in outputs}, []
    for step in reversed(graph.steps):
        if not any(id(v) in wanted and not cut.crosses(v) for v in step.outputs):
            continue
        if step.body is not None:
            step = _late_loop(step, wanted, cut)
        elif step.op not in PRODUCTS | _LAYOUTS | _SUMS:
            continue  # I has made it
        wanted |= {id(v) for v in step.inputs}
        steps.append(step)
    return Graph(inputs=(), outputs=tuple(outputs), steps=tuple(steps[::-1]))


def _late_loop(step: Step, wanted: Collection[int], cut: _Cut) -> Step:
    """The loop with the outputs that are wanted, over the stacks of what crosses."""
    assert step.body is not None
    num_consts, num_carry = step.num_consts, step.num_carry
    pairs = zip(step.outputs, step.body.outputs, strict=True)
    made = [p for i, p in enumerate(pairs) if i >= num_carry and id(p[0]) in wanted]
    body = _late(step.body, [inner for _, inner in made], cut)
    given = list(zip(step.inputs, step.body.inputs, strict=True))
    read = _once([v for s in body.steps for v in s.inputs])
    stacks = [(cut.stacks[id(v)], v) for v in read if id(v) in cut.stacks]
    inputs = given[:num_consts] + given[num_consts + num_carry :] + stacks
    loop = replace(
        step,
        num_carry=0,
        inputs=tuple(outer for outer, _ in inputs),
        outputs=tuple(outer for outer, _ in made),
        body=replace(body, inputs=tuple(inner for _, inner in inputs)),
    )
    return _reading(loop)


def _reading(loop: Step) -> Step:
    """The loop without the inputs that its body does not read; the carry stays."""
    assert loop.body is not None
    num_consts, num_carry = loop.num_consts, loop.num_carry
    read = {id(v) for step in loop.body.steps for v in step.inputs}
    read |= {id(v) for v in loop.body.outputs}
    carry = range(num_consts, num_consts + num_carry)
    pairs = enumerate(zip(loop.inputs, loop.body.inputs, strict=True))
    kept = [(i, *pair) for i, pair in pairs if i in carry or id(pair[1]) in read]
    num_kept = sum(i < num_consts for i, _, _ in kept)
    return replace(
        loop,
        num_consts=num_kept,
        inputs=tuple(outer for _, outer, _ in kept),
        body=replace(loop.body, inputs=tuple(inner for _, _, inner in kept)),
    )


def _operands(passes: Passes) -> tuple[dict[int, tuple[Value, int]], list[Value]]:
    """What W's products read, before layouts, with how many there are of each; and the
    gradients that no product makes."""
    products, others = weight_products(passes)
    makers = _makers(passes.backward)
    weights = {id(v) for v in passes.weights}
    needed: dict[int, tuple[Value, int]] = {}
    for step, repeats in products:
        for value in step.inputs:
            source = _before_layouts(value, makers, passes.cuts)
            if source.origin > Origin.CONSTANT and id(source) not in weights:
                needed[id(source)] = source, repeats
    return needed, others


def _once(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple({id(v): v for v in values}.values())


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
        if at >= step.num_carry:
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
