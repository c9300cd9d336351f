# SPDX-License-Identifier: Apache-2.0
"""Determines which values of a graph a compiler stores: its kernels, per backend.

Owns a small model of XLA. Elementwise operations are fused into their readers. Matrix
products, reductions and loops store their outputs and their inputs. A product's operand
is copied if its layout is not the one that the kernel reads.

CPUs (read off compiled programs): a product reads its operands as (batch, free,
contracted) and (batch, contracted, free). Sums are separate kernels, together with the
operations around them (`sums.py`). A costly operation runs once if several kernels read
it, but a graph output is computed again for a product that reads it. Accelerators (read
off programs for GPUs): a product reads any matrix plain or transposed. Sums are fused
with the operations whose results they add, and on GPUs since Ampere also with those
that read the sums. Elementwise kernels that read a common array are one kernel, which
stores all their outputs. TPUs (read off their programs): a product is one kernel with
the elementwise operations on its inputs, and with those on its output if nothing else
reads the output.

Does not own the order of kernels (`turns.py`) nor what is live at once (`liveness.py`).
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hetjax.cluster.catalogue import Backend, Compiler, backend_of_compiler
from hetjax.costs.graph.joins import ATTENTION, RAGGED
from hetjax.costs.graph.sums import REDUCTION, in_place, operand_orders, sums
from hetjax.costs.graph.values import Graph, Operation, Origin, Value

_WHOLE = (
    ATTENTION
    | {RAGGED}
    | frozenset(  # read and write whole arrays
        "argmax argmin cumsum scan scatter scatter-add sort top_k while".split()
    )
)
_COSTLY = frozenset("cos erf exp log logistic rsqrt sin sqrt tanh".split())
_CHEAP = frozenset("convert_element_type reduce_precision reshape".split())
SUMMED = frozenset({"scatter", "scatter-add"})  # summed into zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One step that stores its outputs, with the stored values that it reads.

    It does not start before the `after` values exist.
    """

    step: Operation
    reads: tuple[Value, ...]
    after: tuple[Value, ...] = ()


def identities(values: Collection[Value]) -> frozenset[int]:
    """Return the identities of values that their graph keeps alive."""
    return frozenset(map(id, values))


def kernels(graph: Graph, slices: frozenset[int] = frozenset()) -> tuple[Kernel, ...]:
    """Return a graph's kernels as on a CPU, in the order of the trace.

    `slices` are inputs that are sliced off a stack. A costly operation is fused into
    the kernel that reads it, but stored if several kernels read it.
    """
    stored = _stored(graph)
    costly = identities([v for s in graph.steps if s.op in _COSTLY for v in s.outputs])
    readers = Counter(
        id(v) for kernel in _fused(graph, slices, stored | costly) for v in kernel.reads
    )
    shared = {value for value in costly if readers[value] > 1}
    return _fused(graph, slices, stored | shared)


@lru_cache(maxsize=2048)
def device_kernels(
    graph: Graph, slices: frozenset[int] = frozenset(), compiler: Compiler = "gpu"
) -> tuple[Kernel, ...]:
    """Return a graph's kernels as on an accelerator."""
    stored = _stored_by_devices(graph, stores_sums=compiler != "gpu")
    backend = backend_of_compiler(compiler)
    if backend == "tpu":
        stored -= _in_epilogues(graph)
        return _fused(graph, slices, stored, backend)
    return _merged(_fused(graph, slices, stored, backend))


def _in_epilogues(graph: Graph) -> frozenset[int]:
    """Return the outputs of products that a TPU does not store: a single elementwise
    operation reads them, in the product's own kernel."""
    readers: dict[int, list[Operation]] = {}
    for step in graph.steps:
        for value in step.inputs:
            readers.setdefault(id(value), []).append(step)
    products = [s.outputs[0] for s in graph.steps if s.op == "dot_general"]
    found = []
    for value in products:
        match readers.get(id(value)):
            case [reader] if reader.outputs and not gathers(reader):
                found.append(value)
    return identities(found) - identities(graph.outputs)


def _fused(
    graph: Graph,
    slices: frozenset[int],
    stored: frozenset[int],
    backend: Backend = "cpu",
) -> tuple[Kernel, ...]:
    on_cpu = backend == "cpu"
    whole = _whole(graph, slices, stored)
    roots = {v: (array,) for v, array in whole.items()}
    found: dict[Any, Kernel] = {}
    again: dict[int, Kernel] = {}  # makers of outputs that a CPU may compute again
    late: dict[int, Kernel] = {}  # makers whose output was computed again: run last
    given_back = identities(graph.outputs) if on_cpu else frozenset()

    def read(value: Value) -> tuple[Value, ...]:
        return roots.get(id(value), () if _is_constant(value) else (value,))

    def laid_out(
        value: Value, order: tuple[int, ...], *, flat: bool = False
    ) -> tuple[Value, ...]:
        """Return the value, stored with its dims in this order.

        If `flat`, all dims but one are flattened.
        """
        own = again.get(id(value))
        reads = own.reads if own else read(value)
        as_it_is = id(value) in whole and not own and not flat
        can_read = _plain(value, order) if on_cpu else in_place(value, order)
        if not reads or (as_it_is and can_read):
            return reads
        key = id(value), flat, None if can_read else order
        if key not in found:
            found[key] = _layout_kernel(value, reads)
            if own and found.pop(id(own.step), None):
                late[id(own.step)] = own
        return found[key].step.outputs

    for step in graph.steps:
        if any(whole.get(id(v), v) is not v for v in step.outputs):
            continue  # another shape of a stored array
        reads = _unique([r for v in step.inputs for r in read(v)])
        if step.outputs and not any(id(v) in stored for v in step.outputs):
            roots |= {id(v): reads for v in step.outputs}
            continue
        if step.op == "dot_general" and backend != "tpu":
            on_cpus = zip(step.inputs, operand_orders(step), strict=True)
            pairs = on_cpus if on_cpu else read_by_devices(step)
            reads = _unique([r for v, order in pairs for r in laid_out(v, order)])
        elif step.op == REDUCTION:
            pairs = zip(step.inputs, step.params["orders"], strict=True)
            reads = _unique([r for v, order in pairs for r in laid_out(v, order)])
        elif on_cpu and step.op in SUMMED:
            updates = laid_out(step.inputs[2], _in_order(step.inputs[2]), flat=True)
            reads = _unique([r for v in step.inputs[:2] for r in read(v)] + [*updates])
        after = _unique([r for v in step.after for r in read(v)])
        kernel = Kernel(step=step, reads=reads, after=after)
        if not gathers(step):
            again |= {id(v): kernel for v in step.outputs if id(v) in given_back}
        found[id(step)] = kernel
    return *found.values(), *late.values()


def _whole(
    graph: Graph, slices: frozenset[int], stored: frozenset[int]
) -> dict[int, Value]:
    """Return, by identity, the values that are stored whole, each with the array that
    stores it: itself or, for a reshape, its input, since that makes no copy.

    A graph output has its own buffer.
    """
    there = {
        id(v): v for v in graph.inputs if id(v) not in slices and not _is_constant(v)
    }
    given_back = identities(graph.outputs)
    for step in graph.steps:
        reshaped = step.op == "reshape" and id(step.outputs[0]) not in given_back
        if reshaped and id(step.inputs[0]) in there:
            there[id(step.outputs[0])] = there[id(step.inputs[0])]
        elif any(id(v) in stored for v in step.outputs):
            there |= {id(v): v for v in step.outputs}
    return there


def _in_order(value: Value) -> tuple[int, ...]:
    return tuple(range(len(value.shape)))


def _plain(value: Value, order: tuple[int, ...]) -> bool:
    """Return whether an array can be read in that order without a copy.

    The last two dims may be swapped.
    """
    long = [dim for dim in order if value.shape[dim] > 1]
    return long == sorted(long) or set(order[-2:]) == set(_in_order(value)[-2:])


def _layout_kernel(value: Value, reads: tuple[Value, ...]) -> Kernel:
    step = Operation(op="copy", params={}, inputs=(value,), outputs=(replace(value),))
    return Kernel(step=step, reads=reads)


def read_by_devices(
    step: Operation, makers: Mapping[int, Operation] | None = None
) -> list[tuple[Value, tuple[int, ...]]]:
    """Return a product's operands on an accelerator, each with the order of dims in
    which it is stored for the product.

    A product reads a matrix plain or transposed, so an operand keeps its order if it
    is read as matrices. With `makers`, the inputs of transposes replace transposed
    operands.
    """
    _, batch = step.params["dimension_numbers"]
    found = []
    for number, given in enumerate(zip(step.inputs, operand_orders(step), strict=True)):
        value, order = _before_transposes(*given, makers or {})
        either_way = _either_way(value, order, len(batch[number]))
        found.append((value, _in_order(value) if either_way else order))
    return found


def _before_transposes(
    value: Value, order: tuple[int, ...], makers: Mapping[int, Operation]
) -> tuple[Value, tuple[int, ...]]:
    while (maker := makers.get(id(value))) and maker.op == "transpose":
        value, order = before_transpose(maker, order)
    return value, order


def before_transpose(
    transpose: Operation, order: tuple[int, ...]
) -> tuple[Value, tuple[int, ...]]:
    """Return a transpose's input, and the order of its dims for this output order."""
    permutation = transpose.params["permutation"]
    return transpose.inputs[0], tuple(permutation[dim] for dim in order)


def _either_way(value: Value, order: tuple[int, ...], num_batch: int) -> bool:
    """Return whether an accelerator's product can read an array in that order without a
    copy: as matrices, plain or transposed, whose rows and columns are runs of dims,
    behind the dims of the batch."""
    if order[:num_batch] != tuple(range(num_batch)):
        return False
    long = [dim for dim in order if value.shape[dim] > 1]
    there = sorted(long)
    return any(
        long == [*there[:first], *there[cut:], *there[first:cut]]
        for first in range(len(long) + 1)
        for cut in range(first, len(long) + 1)
    )


def _merged(found: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Join elementwise kernels that read a common array of their own size.

    Kernels are not joined if one depends on the other, directly or indirectly.
    """
    groups: list[list[Kernel]] = []
    needs: list[set[int]] = []
    makers: dict[int, int] = {}
    for kernel in found:
        read = {
            makers[id(v)] for v in (*kernel.reads, *kernel.after) if id(v) in makers
        }
        above = _upstream(needs, read)
        at = next(
            (n for n, g in enumerate(groups) if n not in above and _alike(g, kernel)),
            len(groups),
        )
        if at == len(groups):
            groups.append([])
            needs.append(set())
        groups[at].append(kernel)
        needs[at] |= read
        makers |= {id(v): at for v in kernel.step.outputs}
    return tuple(map(_as_one, groups))


def _upstream(needs: Sequence[set[int]], begin: set[int]) -> set[int]:
    found, left = set(begin), list(begin)
    while left:
        new = needs[left.pop()] - found
        found |= new
        left += new
    return found


def _alike(group: Sequence[Kernel], kernel: Kernel) -> bool:
    if not all(_element_by_element(other.step) for other in (group[0], kernel)):
        return False
    size = _num_elements(kernel.step.outputs[0])
    read = {id(v) for other in group for v in other.reads if _num_elements(v) == size}
    return _num_elements(group[0].step.outputs[0]) == size and any(
        id(v) in read for v in kernel.reads
    )


def _element_by_element(step: Operation) -> bool:
    return bool(step.outputs) and step.op != "gather" and not gathers(step)


def _num_elements(value: Value) -> int:
    return math.prod(value.shape)


def _as_one(group: Sequence[Kernel]) -> Kernel:
    if len(group) == 1:
        return group[0]
    outputs = tuple(v for kernel in group for v in kernel.step.outputs)
    return Kernel(
        step=Operation(op="fusion", params={}, inputs=(), outputs=outputs),
        reads=_unique([v for kernel in group for v in kernel.reads]),
        after=_unique([v for kernel in group for v in kernel.after]),
    )


def gathers(step: Operation) -> bool:
    """Return whether the kernel reads whole operands, and not element by element."""
    return step.op in _WHOLE or step.op in ("dot_general", REDUCTION) or sums(step)


def _stored(graph: Graph) -> frozenset[int]:
    """Return the values that a CPU stores for any reader.

    Whether it stores a product's operands depends on their layout.
    """
    stored = set(identities(graph.outputs))
    summed = [v for step in graph.steps if step.op == REDUCTION for v in step.inputs]
    factors = [v for s in graph.steps if s.op == "dot_general" for v in s.inputs]
    stored |= identities(summed) & identities(factors)
    for step in graph.steps:
        if gathers(step):
            stored |= identities(step.outputs)
            stored |= identities(step.inputs if step.op in _WHOLE else ())
    constant = [v for step in graph.steps for v in step.outputs if _is_constant(v)]
    return frozenset(stored) - identities(constant)


def _stored_by_devices(graph: Graph, *, stores_sums: bool) -> frozenset[int]:
    """Return the values that accelerators store for any reader.

    Gathers are kernels, too.
    """
    stored = set(identities(graph.outputs))
    for step in graph.steps:
        if step.op in _WHOLE or step.op == "gather":
            stored |= identities((*step.inputs, *step.outputs))
        elif step.op == "dot_general":
            stored |= identities(step.outputs)
    if stores_sums:
        stored |= _around_sums(graph)
    constant = [v for step in graph.steps for v in step.outputs if _is_constant(v)]
    return frozenset(stored) - identities(constant)


def _around_sums(graph: Graph) -> frozenset[int]:
    """Return the sums, and their inputs that are not cheap and have other readers."""
    steps = [step for step in graph.steps if sums(step)]
    readers = Counter(id(v) for step in graph.steps for v in step.inputs)
    summed = [v for step in steps for v in step.inputs if readers[id(v)] > 1]
    cheap = [v for s in graph.steps if s.op in _CHEAP for v in s.outputs]
    made = [v for step in steps for v in step.outputs]
    return identities(made) | identities(summed) - identities(cheap)


def _is_constant(value: Value) -> bool:
    return value.origin is Origin.CONSTANT


def _unique(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple({id(v): v for v in values}.values())
