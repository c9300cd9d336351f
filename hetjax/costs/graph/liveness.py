# SPDX-License-Identifier: Apache-2.0
"""What of a graph lives at once while a program runs.

Owns the walk over kernels in the order in which they run. A loop's body slices the
stacks that it reads when it starts, and has its space for as long as the loop runs; a
carry that it only adds to is updated in place. On accelerators a loop whose body reads
slices in another layout than their stack has is given a copy of the whole stack.

Does not own the graph (`values.py`), what is stored (`fusion.py`), in which order
(`turns.py`), nor the buffers around a program (`costs/stage_memory.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetjax.cluster.catalogue import Backend
from hetjax.costs.graph.fusion import (
    SUMMED,
    Kernel,
    device_kernels,
    gathers,
    identities,
    kernels,
    operand_orders,
    reads_as_matrix,
)
from hetjax.costs.graph.turns import breadth_first, least_memory
from hetjax.costs.graph.values import Cuts, Graph, Operation, Value

_UPDATES = frozenset({"add", "add_any", "dynamic_update_slice"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What is special about values of a program, by identity.

    `elsewhere` have buffers of their own, `relaid` are stacks that a loop can only
    read as a copy in another layout; `backend` is JAX's word for the platform.
    """

    backend: Backend = "cpu"
    elsewhere: frozenset[int] = frozenset()
    relaid: frozenset[int] = frozenset()


def peak_bytes(
    graph: Graph,
    cuts: Cuts,
    around: Surroundings,
    slices: frozenset[int] = frozenset(),
) -> int:
    """Give the most bytes that live at once in what a graph makes, copies included.

    Its inputs do not count, but copies of `slices` do, which a body reads off stacks.
    """
    ordered = _in_turn(graph, slices, around.backend)
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


@lru_cache(maxsize=2048)
def _in_turn(
    graph: Graph, slices: frozenset[int], backend: Backend
) -> tuple[Kernel, ...]:
    """The kernels in the order in which they run: the same however dims are cut."""
    if backend == "cpu":
        return tuple(breadth_first(kernels(graph, slices)))
    return tuple(least_memory(device_kernels(graph, slices), graph))


def _there_at_once(
    ordered: Sequence[Kernel], cuts: Cuts, own: Collection[int]
) -> dict[int, int]:
    """Bytes by identity of what begins as zeros: stacks and sums that are filled."""
    zeros = [v for kernel in ordered for v in _filled(kernel.step) if id(v) in own]
    return {id(v): cuts.num_bytes(v) for v in zeros}


def _filled(step: Operation) -> tuple[Value, ...]:
    if step.body is not None:
        return step.outputs[step.num_carry :]
    return step.outputs if step.op in SUMMED else ()


def _loop_bytes(step: Operation, cuts: Cuts, around: Surroundings) -> int:
    """Bytes that live while a loop runs: its body's, its carry, relaid stacks."""
    if step.body is None:
        return 0
    num_consts, num_carry = step.num_consts, step.num_carry
    slices = identities(step.body.inputs[num_consts + num_carry :])
    updated = _updated(step)
    own = identities([step.body.outputs[at] for at in updated])
    written = _written_at_once(step, slices, around.backend)
    inside = replace(around, elsewhere=around.elsewhere | written | own)
    given = step.inputs[num_consts : num_consts + num_carry]
    carry = [v for at, v in enumerate(given) if at not in updated]
    turned = () if around.backend == "cpu" else _turned_stacks(step)
    relaid = [v for v in step.inputs if id(v) in around.relaid]
    copied = sum(map(cuts.num_bytes, (*carry, *relaid, *turned)))
    return peak_bytes(step.body, cuts, inside, slices) + copied


@lru_cache(maxsize=1024)
def _turned_stacks(loop: Operation) -> tuple[Value, ...]:
    """Stacks of heads (batch, positions, heads, size) whose slices a product reads in
    another order: the whole stack is copied into it."""
    assert loop.body is not None
    turned, begin = _read_turned(loop.body), loop.num_consts + loop.num_carry
    pairs = zip(loop.inputs[begin:], loop.body.inputs[begin:], strict=True)
    return tuple(
        stack for stack, given in pairs if id(given) in turned and len(given.shape) > 3
    )


def _read_turned(graph: Graph) -> frozenset[int]:
    """Inputs of a graph that reach a product of batches which reads them in another
    order, through nothing but operations element by element."""
    makers = {id(v): step for step in graph.steps for v in step.outputs}
    left = [v for step in graph.steps for v in _turned_operands(step)]
    seen: dict[int, Value] = {}
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        maker = makers.get(id(value))
        if maker and not gathers(maker):
            left += [v for v in maker.inputs if len(v.shape) > 2]
    return identities(graph.inputs) & seen.keys()


def _turned_operands(step: Operation) -> list[Value]:
    if step.body is not None:
        turned = _read_turned(step.body)
        pairs = zip(step.inputs, step.body.inputs, strict=True)
        return [value for value, given in pairs if id(given) in turned]
    if step.op != "dot_general" or not step.params["dimension_numbers"][1][0]:
        return []
    orders = zip(step.inputs, operand_orders(step), strict=True)
    return [value for value, order in orders if not reads_as_matrix(value, order)]


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


def _written_at_once(
    loop: Operation, slices: frozenset[int], backend: Backend
) -> frozenset[int]:
    """Outputs of a loop's body that are fused with writing them into their stack.

    On accelerators those that no other kernel reads or makes part of.
    """
    assert loop.body is not None
    stacked = loop.body.outputs[loop.num_carry :]
    makers = {id(v): step for step in loop.body.steps for v in step.outputs}
    written = frozenset(
        id(v) for v in stacked if id(v) in makers and not gathers(makers[id(v)])
    )
    if backend == "cpu":
        return written
    ordered = _in_turn(loop.body, slices, backend)
    read = {id(v) for kernel in ordered for v in kernel.reads}
    joint = [v for k in ordered if len(k.step.outputs) > 1 for v in k.step.outputs]
    return written - read - identities(joint)
