# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of a graph that are live at once while a program runs.

Owns the walk over kernels in the order in which they run. A loop's body slices the
stacks that it reads when it starts, and keeps its space for as long as the loop runs. A
carry that the body only adds to is updated in place. On accelerators, a loop gets a
copy of a whole stack if its body reads slices in another layout than the stack's. On
CPUs, zeros that a loop adds to and masks that it reads exist before the loop.

Does not own the graph (`values.py`), the choice of stored values (`fusion.py`), their
order (`turns.py`), nor the buffers around a program (`costs/stage_memory.py`).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from hetjax.cluster.catalogue import Backend
from hetjax.costs.graph.fusion import (
    SUMMED,
    WRITE,
    Kernel,
    device_kernels,
    gathers,
    identities,
    kernels,
)
from hetjax.costs.graph.kernels import all_reduces, partial_sums
from hetjax.costs.graph.layouts import gated_stacks, in_lanes, turned_stacks
from hetjax.costs.graph.merging import merged
from hetjax.costs.graph.sums import reduced
from hetjax.costs.graph.turns import breadth_first, depth_first, least_memory
from hetjax.costs.graph.values import Cuts, Graph, Operation, Origin, Value

# The next kernel: of all that are ready, the one that frees most; or depth first, the
# heaviest first or in the order in which kernels read.
Order = Literal["freeing", "heaviest", "read"]

_UPDATES = frozenset({"add", "add_any", "dynamic_update_slice"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Facts about a program and, by identity, about its values.

    `elsewhere` have their own buffers; `relaid` are stacks that a loop can only read as
    a copy in another layout. `backend` is JAX's name of the platform. An accelerator's
    kernels run in `order`. `turns_gates`: whether the program copies `gated_stacks`.
    """

    backend: Backend = "cpu"
    order: Order = "freeing"
    turns_gates: bool = False
    elsewhere: frozenset[int] = frozenset()
    relaid: frozenset[int] = frozenset()


def least_peak_bytes(graph: Graph, cuts: Cuts, around: Surroundings) -> int:
    """Return the peak bytes in the best of the three orders that XLA tries for GPUs.

    In programs with all-reduces XLA moves kernels again to hide these: all that we saw
    ran in order `freeing`.
    """
    if around.backend != "gpu" or all_reduces(graph, cuts):
        return peak_bytes(graph, cuts, around)
    orders = get_args(Order)
    return min(peak_bytes(graph, cuts, replace(around, order=o)) for o in orders)


def peak_bytes(
    graph: Graph,
    cuts: Cuts,
    around: Surroundings,
    slices: frozenset[int] = frozenset(),
    stacks: tuple[tuple[Value, Value], ...] = (),
) -> int:
    """Return the most bytes of a graph's values and copies that are live at once.

    The graph's inputs do not count, but copies of `slices` do, which a body reads off
    stacks. A body's outputs in `stacks` live only until kernels have written them.
    """
    ordered = _in_turn(graph, cuts, slices, stacks, around.backend, around.order)
    written = identities([v for v, _ in stacks])
    last_use = {id(v): at for at, kernel in enumerate(ordered) for v in kernel.reads}
    last_use |= {id(v): len(ordered) for v in graph.outputs if id(v) not in written}
    own = last_use.keys() - identities(graph.inputs) - around.elsewhere
    live = _there_at_once(ordered, cuts, own, around)
    peak = 0
    for at, kernel in enumerate(ordered):
        live |= {id(v): cuts.num_bytes(v) for v in kernel.step.outputs if id(v) in own}
        inside_bytes = _loop_bytes(kernel.step, graph, cuts, around)
        peak = max(peak, sum(live.values()) + inside_bytes)
        live = {v: size for v, size in live.items() if last_use[v] > at}
    return peak


@lru_cache(maxsize=8192)
def _in_turn(
    graph: Graph,
    cuts: Cuts,
    slices: frozenset[int],
    stacks: tuple[tuple[Value, Value], ...],
    backend: Backend,
    order: Order,
) -> tuple[Kernel, ...]:
    """Return the kernels in the order in which they run."""
    if backend == "cpu":
        written = tuple(v for v, _ in stacks)
        found = _on_cpu(graph, cuts, slices)
        return tuple(breadth_first([*found, *map(_write, written)]))
    # in loops, all-reduces were seen not to change the order of kernels
    partial = frozenset() if slices else partial_sums(graph, cuts)
    found = list(_on_device(graph, cuts, slices, backend))
    found += [_write(v) for v, _ in stacks]
    if order == "freeing":
        whole = {id(v): cuts.num_bytes(stack) for v, stack in stacks}
        wait = backend == "tpu"
        return tuple(
            least_memory(found, graph, cuts.num_bytes, whole, partial, loops_wait=wait)
        )
    weighed = order == "heaviest"
    return tuple(depth_first(found, graph, cuts.num_bytes, weighed=weighed))


@lru_cache(maxsize=2048)
def _on_cpu(graph: Graph, cuts: Cuts, slices: frozenset[int]) -> tuple[Kernel, ...]:
    """Return the kernels on a CPU, in the order of the trace."""
    return kernels(reduced(graph, cuts), slices)


@lru_cache(maxsize=2048)
def _on_device(
    graph: Graph, cuts: Cuts, slices: frozenset[int], backend: Backend
) -> tuple[Kernel, ...]:
    """Return the kernels on an accelerator, unordered; GPUs join small products."""
    joined = merged(graph, cuts) if backend == "gpu" else graph
    return device_kernels(joined, slices, backend)


def _write(value: Value) -> Kernel:
    step = Operation(op=WRITE, params={}, inputs=(value,), outputs=())
    return Kernel(step=step, reads=(value,))


def _there_at_once(
    ordered: Sequence[Kernel],
    cuts: Cuts,
    own: Collection[int],
    around: Surroundings,
) -> dict[int, int]:
    """Return, by identity, the bytes of arrays that exist from the start: stacks, in
    order `freeing` also scatters' sums, and on CPUs carries that begin as constants.
    TPUs make such arrays only when kernels need them."""
    if around.backend == "tpu":
        return {}
    at_once = around.order == "freeing"
    zeros = [v for k in ordered for v in _filled(k.step, at_once) if id(v) in own]
    if around.backend == "cpu":
        zeros += [v for k in ordered for v in _begun(k.step) if id(v) in own]
    return {id(v): cuts.num_bytes(v) for v in zeros}


def _begun(step: Operation) -> list[Value]:
    """Return a loop's carries that start as constants, which a CPU makes at once."""
    given = step.inputs[step.num_consts :] if step.body is not None else ()
    begun = zip(given, step.outputs[: step.num_carry], strict=False)
    return [made for value, made in begun if value.origin is Origin.CONSTANT]


def _filled(step: Operation, sums: bool) -> tuple[Value, ...]:
    if step.body is not None:
        return step.outputs[step.num_carry :]
    return step.outputs if sums and step.op in SUMMED else ()


def _loop_bytes(step: Operation, graph: Graph, cuts: Cuts, around: Surroundings) -> int:
    """Return the bytes that are live while a loop of the graph runs: its body's, its
    carry, copies of stacks, and on CPUs constant arrays."""
    if step.body is None:
        return 0
    num_consts, num_carry = step.num_consts, step.num_carry
    slices = identities(step.body.inputs[num_consts + num_carry :])
    cuts = in_lanes(cuts, step, around.backend)
    updated = _updated(step)
    own = identities([step.body.outputs[at] for at in updated])
    written = _written_at_once(step, slices, cuts, around.backend)
    inside = replace(around, elsewhere=around.elsewhere | written | own)
    given = step.inputs[num_consts : num_consts + num_carry]
    carry = [v for at, v in enumerate(given) if at not in updated]
    if around.backend == "tpu":  # program outputs are carried in their own buffers
        pairs = zip(given, step.outputs, strict=False)
        back = [v for v, made in pairs if id(made) in around.elsewhere]
        carry = [v for v in carry if id(v) not in identities(back)]
    turned = ()
    if around.backend != "cpu":  # stacks that the graph makes already have that order
        given_to_graph = identities(graph.inputs)
        found = turned_stacks(step, around.backend)
        found += gated_stacks(step) if around.turns_gates else ()
        turned = tuple(v for v in found if id(v) in given_to_graph)
    relaid = [v for v in step.inputs if id(v) in around.relaid]
    copied_bytes = sum(map(cuts.num_bytes, (*relaid, *turned)))
    if around.backend == "cpu":
        copied_bytes += _constant_bytes(step, cuts)
    stacks = () if around.backend == "tpu" else _stacks(step, written)
    body_bytes = peak_bytes(step.body, cuts, inside, slices, stacks)
    return body_bytes + sum(map(cuts.num_bytes, carry)) + copied_bytes


def _constant_bytes(loop: Operation, cuts: Cuts) -> int:
    """Return the bytes of constant arrays, mostly masks, that a CPU makes before the
    loop, cut like the arrays that the body computes from them."""
    assert loop.body is not None
    found = {
        id(v): math.prod(cuts.shape(step.outputs[0])) * v.dtype.itemsize
        for step in loop.body.steps
        for v in step.inputs
        if v.origin is Origin.CONSTANT and v.shape == step.outputs[0].shape != ()
    }
    consts = identities(loop.body.inputs[: loop.num_consts])
    return sum(size for v, size in found.items() if v in consts)


def _stacks(
    loop: Operation, written: frozenset[int]
) -> tuple[tuple[Value, Value], ...]:
    """Return the body's outputs that a kernel writes into a stack, with that stack."""
    assert loop.body is not None
    kept, begin = identities(loop.body.outputs[: loop.num_carry]), loop.num_carry
    made = identities([v for step in loop.body.steps for v in step.outputs])
    pairs = zip(loop.body.outputs[begin:], loop.outputs[begin:], strict=True)
    found = {id(v): (v, stack) for v, stack in pairs if id(v) in made - kept - written}
    return tuple(found.values())


def _updated(loop: Operation) -> list[int]:
    """Return the carries updated in place: the loop's body reads slices and adds."""
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
    loop: Operation, slices: frozenset[int], cuts: Cuts, backend: Backend
) -> frozenset[int]:
    """Return the outputs of a loop's body whose kernels also write them into stacks.

    On accelerators no other kernel may read such an output, and its kernel may have no
    other output. On TPUs outputs of products count, too.
    """
    assert loop.body is not None
    stacked = loop.body.outputs[loop.num_carry :]
    makers = {id(v): step for step in loop.body.steps for v in step.outputs}
    if backend == "cpu":
        found = _on_cpu(loop.body, cuts, slices)
        makers |= {id(v): k.step for k in found for v in k.step.outputs}
    written = frozenset(
        id(v) for v in stacked if id(v) in makers and not gathers(makers[id(v)])
    )
    if backend == "cpu":
        whole = [v for k in found if gathers(k.step) for v in k.reads]
        return written - identities(whole)
    found = _on_device(loop.body, cuts, slices, backend)
    read = {id(v) for kernel in found for v in kernel.reads}
    joint = [v for k in found if len(k.step.outputs) > 1 for v in k.step.outputs]
    if backend == "tpu":
        products = [k.step for k in found if k.step.op == "dot_general"]
        written |= identities(stacked) & identities([s.outputs[0] for s in products])
    return written - read - identities(joint)
