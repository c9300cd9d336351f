# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of a graph that are live at once while a program runs.

Owns the walk over kernels in the order in which they run. A loop's body slices the
stacks that it reads when it starts, and keeps its space for as long as the loop runs. A
carry that the body only adds to is updated in place. On accelerators, a loop gets a
copy of a whole stack if its body reads slices in another layout than the stack's.

Does not own the graph (`values.py`), the choice of stored values (`fusion.py`), their
order (`turns.py`), nor the buffers around a program (`costs/stage_memory.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetjax.cluster.catalogue import Backend, Compiler, backend_of_compiler
from hetjax.costs.graph.fusion import (
    SUMMED,
    Kernel,
    device_kernels,
    gathers,
    identities,
    kernels,
)
from hetjax.costs.graph.layouts import gated_stacks, in_lanes, turned_stacks
from hetjax.costs.graph.sums import reduced
from hetjax.costs.graph.turns import breadth_first, least_memory
from hetjax.costs.graph.values import Cuts, Graph, Operation, Value

_UPDATES = frozenset({"add", "add_any", "dynamic_update_slice"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Facts about a program and, by identity, about its values.

    `elsewhere` have their own buffers; `relaid` are stacks that a loop can only read as
    a copy in another layout. `turns_gates`: whether the program copies `gated_stacks`.
    """

    compiler: Compiler = "cpu"
    turns_gates: bool = False
    elsewhere: frozenset[int] = frozenset()
    relaid: frozenset[int] = frozenset()

    @property
    def backend(self) -> Backend:
        return backend_of_compiler(self.compiler)


def peak_bytes(
    graph: Graph,
    cuts: Cuts,
    around: Surroundings,
    slices: frozenset[int] = frozenset(),
) -> int:
    """Return the most bytes of a graph's values and copies that are live at once.

    The graph's inputs do not count, but copies of `slices` do, which a body reads off
    stacks.
    """
    ordered = _in_turn(graph, cuts, slices, around.compiler)
    last_use = {id(v): at for at, kernel in enumerate(ordered) for v in kernel.reads}
    last_use |= {id(v): len(ordered) for v in graph.outputs}
    own = last_use.keys() - identities(graph.inputs) - around.elsewhere
    live = _there_at_once(ordered, cuts, own, around.backend)
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
    compiler: Compiler,
) -> tuple[Kernel, ...]:
    """Return the kernels in the order in which they run."""
    if compiler == "cpu":
        return tuple(breadth_first(_on_cpu(graph, cuts, slices)))
    found = device_kernels(graph, slices, compiler)
    wait = backend_of_compiler(compiler) == "tpu"
    return tuple(least_memory(found, graph, cuts.num_bytes, loops_wait=wait))


@lru_cache(maxsize=2048)
def _on_cpu(graph: Graph, cuts: Cuts, slices: frozenset[int]) -> tuple[Kernel, ...]:
    """Return the kernels on a CPU, in the order of the trace."""
    return kernels(reduced(graph, cuts), slices)


def _there_at_once(
    ordered: Sequence[Kernel],
    cuts: Cuts,
    own: Collection[int],
    backend: Backend,
) -> dict[int, int]:
    """Return, by identity, the bytes of arrays that exist from the start: stacks and
    scatters' sums. TPUs make such arrays only when kernels need them."""
    if backend == "tpu":
        return {}
    zeros = [v for k in ordered for v in _filled(k.step) if id(v) in own]
    return {id(v): cuts.num_bytes(v) for v in zeros}


def _filled(step: Operation) -> tuple[Value, ...]:
    if step.body is not None:
        return step.outputs[step.num_carry :]
    return step.outputs if step.op in SUMMED else ()


def _loop_bytes(step: Operation, graph: Graph, cuts: Cuts, around: Surroundings) -> int:
    """Return the bytes that are live while a loop of the graph runs: its body's, its
    carry, and copies of stacks."""
    if step.body is None:
        return 0
    num_consts, num_carry = step.num_consts, step.num_carry
    slices = identities(step.body.inputs[num_consts + num_carry :])
    cuts = in_lanes(cuts, step, around.backend)
    updated = _updated(step)
    own = identities([step.body.outputs[at] for at in updated])
    written = _written_at_once(step, slices, cuts, around.compiler)
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
    body_bytes = peak_bytes(step.body, cuts, inside, slices)
    return body_bytes + sum(map(cuts.num_bytes, (*carry, *relaid, *turned)))


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
    loop: Operation, slices: frozenset[int], cuts: Cuts, compiler: Compiler
) -> frozenset[int]:
    """Return the outputs of a loop's body whose kernels also write them into stacks.

    On accelerators no other kernel may read such an output, and its kernel may have no
    other output. On TPUs outputs of products count, too.
    """
    assert loop.body is not None
    stacked = loop.body.outputs[loop.num_carry :]
    makers = {id(v): step for step in loop.body.steps for v in step.outputs}
    if compiler == "cpu":
        found = _on_cpu(loop.body, cuts, slices)
        makers |= {id(v): k.step for k in found for v in k.step.outputs}
    written = frozenset(
        id(v) for v in stacked if id(v) in makers and not gathers(makers[id(v)])
    )
    if compiler == "cpu":
        whole = [v for k in found if gathers(k.step) for v in k.reads]
        return written - identities(whole)
    found = device_kernels(loop.body, slices, compiler)
    read = {id(v) for kernel in found for v in kernel.reads}
    joint = [v for k in found if len(k.step.outputs) > 1 for v in k.step.outputs]
    if backend_of_compiler(compiler) == "tpu":
        products = [k.step for k in found if k.step.op == "dot_general"]
        written |= identities(stacked) & identities([s.outputs[0] for s in products])
    return written - read - identities(joint)
