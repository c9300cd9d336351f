# SPDX-License-Identifier: Apache-2.0
"""Which values of a graph a compiler stores, in which order, and what lives at once.

Owns a small model of XLA, read off its CPU backend. Operations element by element are
fused into what reads them; matrix products, reductions and loops store what they make
and what they read. A product's operand in another layout than (batch, free, contracted)
and (batch, contracted, free) is copied. Kernels run breadth first: as soon as what they
read is there. A loop's body slices the stacks that it reads when it starts, and has its
space for as long as the loop runs; a carry that it only adds to is updated in place.

Does not own the graph (`values.py`) nor the buffers around a program
(`costs/stage_memory.py`).
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hetjax.costs.graph.joins import ATTENTION
from hetjax.costs.graph.values import Cuts, Graph, Operation, Origin, Value

_WHOLE = ATTENTION | frozenset(  # read and write whole arrays
    "argmax argmin cumsum scan scatter scatter-add sort top_k while".split()
)
_COSTLY = frozenset("cos erf exp log logistic rsqrt sin sqrt tanh".split())
_FORMED = frozenset({"integer_pow", "mul", "square"})
_UPDATES = frozenset({"add", "add_any", "dynamic_update_slice"})
_SUMMED = frozenset({"scatter", "scatter-add"})  # into zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One step that stores its outputs, with the stored values that it reads.

    It does not begin before those `after` are there.
    """

    step: Operation
    reads: tuple[Value, ...]
    after: tuple[Value, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What is special about values of a program, by identity.

    `elsewhere` have buffers of their own, `relaid` are stacks that a loop can only
    read as a copy in another layout.
    """

    elsewhere: frozenset[int] = frozenset()
    relaid: frozenset[int] = frozenset()


def identities(values: Collection[Value]) -> frozenset[int]:
    """Give the identities of values that are kept alive by their graph."""
    return frozenset(map(id, values))


def kernels(graph: Graph, slices: frozenset[int] = frozenset()) -> tuple[Kernel, ...]:
    """Fuse a graph: the steps that store something, in the order of the trace.

    `slices` are inputs that are sliced off a stack. A costly operation is repeated in
    whatever reads it unless several kernels would.
    """
    stored = _stored(graph)
    costly = identities([v for s in graph.steps if s.op in _COSTLY for v in s.outputs])
    readers = Counter(
        id(v) for kernel in _fused(graph, slices, stored | costly) for v in kernel.reads
    )
    shared = {value for value in costly if readers[value] > 1}
    return _fused(graph, slices, stored | shared)


def _fused(
    graph: Graph, slices: frozenset[int], stored: frozenset[int]
) -> tuple[Kernel, ...]:
    roots: dict[int, tuple[Value, ...]] = {}
    found: dict[Any, Kernel] = {}

    def read(value: Value) -> tuple[Value, ...]:
        return roots.get(id(value), () if _is_constant(value) else (value,))

    def laid_out(
        value: Value, order: tuple[int, ...], *, flat: bool = False
    ) -> tuple[Value, ...]:
        """The value stored as a whole, its dims in this order, or all but one flat."""
        reads = read(value)
        as_it_is = reads == (value,) and id(value) not in slices and not flat
        if not reads or (as_it_is and _plain(value, order)):
            return reads
        key = id(value), order
        if key not in found:
            found[key] = _layout_kernel(value, reads)
        return found[key].step.outputs

    makers = {id(v): step for step in graph.steps for v in step.outputs}
    for step in graph.steps:
        reads = _unique([r for v in step.inputs for r in read(v)])
        if step.outputs and not any(id(v) in stored for v in step.outputs):
            roots |= {id(v): reads for v in step.outputs}
            continue
        if step.op == "dot_general":
            pairs = zip(step.inputs, _operand_orders(step), strict=True)
            reads = _unique([r for v, order in pairs for r in laid_out(v, order)])
        elif _sums(step):
            terms = [t for v in step.inputs for t in _terms(v, makers)]
            reads = _unique([r for t in terms for r in laid_out(t, _in_order(t))])
        elif step.op in _SUMMED:
            updates = laid_out(step.inputs[2], _in_order(step.inputs[2]), flat=True)
            reads = _unique([r for v in step.inputs[:2] for r in read(v)] + [*updates])
        after = _unique([r for v in step.after for r in read(v)])
        found[id(step)] = Kernel(step=step, reads=reads, after=after)
        roots |= {id(v): (v,) for v in step.outputs}
    return tuple(found.values())


def peak_bytes(
    graph: Graph,
    cuts: Cuts,
    around: Surroundings,
    slices: frozenset[int] = frozenset(),
) -> int:
    """Give the most bytes that live at once in what a graph makes, copies included.

    Its inputs do not count, but copies of `slices` do, which a body reads off stacks.
    """
    ordered = _in_turn(graph, slices)
    last_use = {id(v): at for at, kernel in enumerate(ordered) for v in kernel.reads}
    last_use |= {id(v): len(ordered) for v in graph.outputs}
    own = last_use.keys() - identities(graph.inputs) - around.elsewhere
    live = _there_at_once(ordered, cuts, own)
    peak = 0
    for at, kernel in enumerate(ordered):
        live |= {id(v): cuts.num_bytes(v) for v in kernel.step.outputs if id(v) in own}
        peak = max(peak, sum(live.values()) + _loop_bytes(kernel.step, cuts, around))
        live = {v: size for v, size in live.items() if last_use[v] > at}
    return peak


@lru_cache(maxsize=1024)
def _in_turn(graph: Graph, slices: frozenset[int]) -> tuple[Kernel, ...]:
    """The kernels in the order in which they run: the same however dims are cut."""
    return tuple(_breadth_first(kernels(graph, slices)))


def _there_at_once(
    ordered: Sequence[Kernel], cuts: Cuts, own: Collection[int]
) -> dict[int, int]:
    """Bytes by identity of what begins as zeros: stacks and sums that are filled."""
    zeros = [v for kernel in ordered for v in _filled(kernel.step) if id(v) in own]
    return {id(v): cuts.num_bytes(v) for v in zeros}


def _filled(step: Operation) -> tuple[Value, ...]:
    if step.body is not None:
        return step.outputs[step.num_carry :]
    return step.outputs if step.op in _SUMMED else ()


def _gathers(step: Operation) -> bool:
    """Whether the kernel reads whole operands, and not element by element."""
    return step.op in _WHOLE or step.op == "dot_general" or _sums(step)


def _sums(step: Operation) -> bool:
    """Whether the kernel reduces a dim; one of size 1 is only dropped."""
    if not step.op.startswith("reduce_"):
        return False
    return math.prod(step.inputs[0].shape) > math.prod(step.outputs[0].shape)


def _loop_bytes(step: Operation, cuts: Cuts, around: Surroundings) -> int:
    """Bytes that live while a loop runs: its body's, its carry, relaid stacks."""
    if step.body is None:
        return 0
    num_consts, num_carry = step.num_consts, step.num_carry
    slices = step.body.inputs[num_consts + num_carry :]
    stacked = step.body.outputs[num_carry:]
    updated = _updated(step)
    own = identities([step.body.outputs[at] for at in updated])
    written = _written_at_once(step.body, stacked)
    inside = replace(around, elsewhere=around.elsewhere | written | own)
    given = step.inputs[num_consts : num_consts + num_carry]
    carry = [v for at, v in enumerate(given) if at not in updated]
    relaid = [v for v in step.inputs if id(v) in around.relaid]
    return (
        peak_bytes(step.body, cuts, inside, identities(slices))
        + sum(cuts.num_bytes(v) for v in carry)
        + sum(cuts.num_bytes(v) for v in relaid)
    )


def _updated(loop: Operation) -> list[int]:
    """Carries that the loop updates in place: each body reads slices and adds."""
    assert loop.body is not None
    steps, outputs = loop.body.steps, loop.body.outputs
    makers = {id(v): step for step in steps for v in step.outputs}
    readers: dict[int, list[Operation]] = {}
    for step in steps:
        for value in step.inputs:
            readers.setdefault(id(value), []).append(step)
    found = []
    for at in range(loop.num_carry):
        given = readers.get(id(loop.body.inputs[loop.num_consts + at]), [])
        maker = makers.get(id(outputs[at]))
        if maker in given and all(
            step.op == "dynamic_slice" or (step is maker and step.op in _UPDATES)
            for step in given
        ):
            found.append(at)
    return found


def _written_at_once(body: Graph, stacked: Collection[Value]) -> frozenset[int]:
    """Outputs of a body that are fused with writing them into their stack."""
    makers = {id(v): step for step in body.steps for v in step.outputs}
    return frozenset(
        id(v) for v in stacked if id(v) in makers and not _gathers(makers[id(v)])
    )


def _terms(value: Value, makers: Mapping[int, Operation]) -> list[Value]:
    """What a reduction reads: a product or square is formed on the way."""
    maker = makers.get(id(value))
    if maker is None or maker.op not in _FORMED:
        return [value]
    return [v for v in maker.inputs if v.shape == value.shape]


def _operand_orders(step: Operation) -> list[tuple[int, ...]]:
    """Dims of both operands of a product in the order in which it reads them."""
    (contracted, batch), orders = step.params["dimension_numbers"], []
    for number, value in enumerate(step.inputs):
        bound = (*contracted[number], *batch[number])
        free = tuple(dim for dim in _in_order(value) if dim not in bound)
        inner = (free, contracted[number])[:: 1 if number == 0 else -1]
        orders.append((*batch[number], *inner[0], *inner[1]))
    return orders


def _in_order(value: Value) -> tuple[int, ...]:
    return tuple(range(len(value.shape)))


def _plain(value: Value, order: tuple[int, ...]) -> bool:
    """Whether an array can be read in that order as it lies; matrices either way."""
    long = [dim for dim in order if value.shape[dim] > 1]
    return long == sorted(long) or set(order[-2:]) == set(_in_order(value)[-2:])


def _layout_kernel(value: Value, reads: tuple[Value, ...]) -> Kernel:
    step = Operation(op="copy", params={}, inputs=(value,), outputs=(replace(value),))
    return Kernel(step=step, reads=reads)


def _breadth_first(found: tuple[Kernel, ...]) -> list[Kernel]:
    maker = {id(v): at for at, kernel in enumerate(found) for v in kernel.step.outputs}
    needs = [
        {maker[id(v)] for v in (*k.reads, *k.after) if id(v) in maker} for k in found
    ]
    users: list[list[int]] = [[] for _ in found]
    for at, makers in enumerate(needs):
        for made in makers:
            users[made].append(at)
    ready = deque(at for at, makers in enumerate(needs) if not makers)
    ordered = []
    while ready:
        done = ready.popleft()
        ordered.append(found[done])
        for user in users[done]:
            needs[user].remove(done)
            if not needs[user]:
                ready.append(user)
    return ordered


def _stored(graph: Graph) -> frozenset[int]:
    """What is stored whoever reads it; a product's operands depend on their layout."""
    stored = set(identities(graph.outputs))
    summed = [v for step in graph.steps if _sums(step) for v in step.inputs]
    factors = [v for s in graph.steps if s.op == "dot_general" for v in s.inputs]
    stored |= identities(summed) & identities(factors)
    for step in graph.steps:
        if _gathers(step):
            stored |= identities(step.outputs)
            stored |= identities(step.inputs if step.op in _WHOLE else ())
    constant = [v for step in graph.steps for v in step.outputs if _is_constant(v)]
    return frozenset(stored) - identities(constant)


def _is_constant(value: Value) -> bool:
    return value.origin is Origin.CONSTANT


def _unique(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple({id(v): v for v in values}.values())
