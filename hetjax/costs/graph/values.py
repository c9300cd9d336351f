# SPDX-License-Identifier: Apache-2.0
"""Represents a traced function as a flat list of operations with classes of dims.

Owns the graph that all estimates walk: values, steps, scans with their bodies, and the
classes of dims that are cut alike over the tensor axis. Two dims are in one class if
an operation maps one onto the other element by element; a class is cut if a parameter
has a logical axis there. XLA's sharding propagation gives the same result for the
shardings of a stage: values computed from constants alone stay whole.

Does not own the rules of the operations (`joins.py`) nor any estimate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from hetjax.costs.graph.joins import joined_dims
from hetjax.stage.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    attention_kernel,
    called,
    is_literal,
    is_no_choice,
    scan_counts,
    waits_for_all,
)


class Origin(IntEnum):
    """The source from which a value is computed: the last that applies."""

    CONSTANT = 0
    WEIGHTS = 1
    BATCH = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Value:
    """An array of the traced function; `classes` has one class of dims per dim."""

    shape: tuple[int, ...]
    dtype: np.dtype
    classes: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    """One operation; a scan has the graph of its body and repeats it `length` times.

    A scan's inputs are consts, then carries, then xs. The operation does not start
    before the `after` values exist.
    """

    op: str
    params: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    body: "Graph | None" = None
    length: int = 1
    num_consts: int = 0
    num_carry: int = 0
    after: tuple[Value, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """Steps in traced order, calls inlined. For a scan's body, inputs are consts
    (values of the outer graph), carry, slices of xs; outputs are carry, slices of ys.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    steps: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Dims:
    """Classes of dims of all graphs of one stage; they grow while graphs are made."""

    _parents: list[int] = field(default_factory=list)
    _cut: set[int] = field(default_factory=set)
    _whole: set[int] = field(default_factory=set)

    def value(
        self,
        shape: Sequence[int],
        dtype: Any,
        origin: Origin,
        logical: Sequence[str | None] | None = None,
    ) -> Value:
        """Make a value with new classes of dims, cut where `logical` has a name.

        Without `logical` the dims are undetermined; they may turn out to be cut.
        """
        classes = tuple(self.fresh() for _ in shape)
        for dim, name in zip(classes, logical or (), strict=bool(logical)):
            (self._whole if name is None else self._cut).add(dim)
        return Value(
            shape=tuple(shape),
            dtype=np.dtype(dtype),
            classes=classes,
            origin=origin,
        )

    def fresh(self) -> int:
        """Make a class."""
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def root(self, dim: int) -> int:
        """Return the class's representative."""
        while self._parents[dim] != dim:
            self._parents[dim] = self._parents[self._parents[dim]]
            dim = self._parents[dim]
        return dim

    def join(self, a: int, b: int) -> None:
        """Merge two classes."""
        self._parents[self.root(a)] = self.root(b)

    def like(self, value: Value, other: Value) -> None:
        """Cut two values of one shape alike."""
        for a, b in zip(value.classes, other.classes, strict=True):
            self.join(a, b)

    def cut_roots(self) -> frozenset[int]:
        """Return the representatives of all classes that are cut."""
        return frozenset(map(self.root, self._cut))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Sizes on one of `tensor` devices, after all graphs are made.

    Arrays of heads, with the batch in front, fill whole multiples of `lanes`.
    """

    dims: Dims
    cut: frozenset[int]
    tensor: int
    lanes: int = 1

    def is_cut(self, value: Value, dim: int) -> bool:
        """Return whether the dim is sharded over the tensor axis."""
        return (
            self.tensor > 1
            and value.origin is not Origin.CONSTANT
            and self.dims.root(value.classes[dim]) in self.cut
        )

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of the part that one device holds."""
        return tuple(
            -(-size // self.tensor) if self.is_cut(value, dim) else size
            for dim, size in enumerate(value.shape)
        )

    def num_bytes(self, value: Value) -> int:
        """Return the bytes of the part that one device holds."""
        shape = self.shape(value)
        if self.lanes > 1 and value.origin is Origin.BATCH and len(shape) > 3:
            shape = (*shape[:-1], -(-shape[-1] // self.lanes) * self.lanes)
        return math.prod(shape) * value.dtype.itemsize


def graph_of(closed: ClosedJaxpr, inputs: Sequence[Value], dims: Dims) -> Graph:
    """Inline a traced function over these inputs."""
    steps: list[Operation] = []
    outputs = _inlined(closed.jaxpr, closed.consts, inputs, dims, steps)
    return Graph(inputs=tuple(inputs), outputs=outputs, steps=tuple(steps))


def _inlined(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Value],
    dims: Dims,
    steps: list[Operation],
) -> tuple[Value, ...]:
    known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        known[var] = dims.value(np.shape(const), const.dtype, Origin.CONSTANT)

    def value(atom: Any) -> Value:
        if is_literal(atom):
            aval: Any = atom.aval
            return dims.value(aval.shape, aval.dtype, Origin.CONSTANT)
        return known[atom]

    for equation in jaxpr.eqns:
        arguments = tuple(map(value, equation.invars))
        outputs = _outputs(equation, arguments, dims, steps)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return tuple(map(value, jaxpr.outvars))


def _outputs(
    equation: Any, arguments: tuple[Value, ...], dims: Dims, steps: list[Operation]
) -> tuple[Value, ...]:
    if is_no_choice(equation):
        return (arguments[1],)
    if equation.primitive.name == "scan":
        step = _scan(equation, arguments, dims)
    elif (kernel := attention_kernel(equation)) is not None:
        step = _operation(kernel, equation, arguments, dims)
    elif (inner := called(equation.params)) is not None:
        jaxpr, consts = inner
        begin = len(steps)
        outputs = _inlined(jaxpr, consts, arguments, dims, steps)
        if waits_for_all(equation.params):
            steps[begin:] = [replace(s, after=arguments) for s in steps[begin:]]
        return outputs
    else:
        step = _operation(equation.primitive.name, equation, arguments, dims)
    steps.append(step)
    return step.outputs


def _operation(
    name: str, equation: Any, arguments: tuple[Value, ...], dims: Dims
) -> Operation:
    origin = max((a.origin for a in arguments), default=Origin.CONSTANT)
    outputs = tuple(
        # tokens, keys and the like have no dtype that numpy knows
        dims.value(out.aval.shape, _numpy_dtype(out.aval.dtype), origin)
        for out in equation.outvars
    )
    shapes = [a.shape for a in arguments]
    for output in outputs:
        joins = joined_dims(name, equation.params, shapes, output.shape)
        for argument, dim, out_dim in joins:
            given = arguments[argument]
            if given.origin is not Origin.CONSTANT:
                dims.join(given.classes[dim], output.classes[out_dim])
    if name == "dot_general":
        _join_contracted(equation.params["dimension_numbers"], arguments, dims)
    return Operation(op=name, params=equation.params, inputs=arguments, outputs=outputs)


def _join_contracted(numbers: Any, arguments: tuple[Value, ...], dims: Dims) -> None:
    lhs, rhs = arguments
    if Origin.CONSTANT in (lhs.origin, rhs.origin):
        return
    for of_lhs, of_rhs in numbers:
        for a, b in zip(of_lhs, of_rhs, strict=True):
            dims.join(lhs.classes[a], rhs.classes[b])


def _scan(equation: Any, arguments: tuple[Value, ...], dims: Dims) -> Operation:
    params = equation.params
    length, (num_consts, num_carry) = params["length"], scan_counts(params)
    consts, rest = arguments[:num_consts], arguments[num_consts:]
    carry = tuple(_of_batch(value) for value in rest[:num_carry])
    slices = tuple(_slice(value) for value in rest[num_carry:])
    body = graph_of(params["jaxpr"], (*consts, *carry, *slices), dims)
    for before, after in zip(carry, body.outputs[:num_carry], strict=True):
        if after.origin is not Origin.CONSTANT:
            dims.like(before, after)
    stacked = tuple(_stacked(value, length, dims) for value in body.outputs[num_carry:])
    return Operation(
        op="scan",
        params=params,
        inputs=arguments,
        outputs=(*map(_of_batch, carry), *stacked),
        body=body,
        length=length,
        num_consts=num_consts,
        num_carry=num_carry,
    )


def _of_batch(value: Value) -> Value:
    return replace(value, origin=Origin.BATCH)


def _slice(value: Value) -> Value:
    return replace(value, shape=value.shape[1:], classes=value.classes[1:])


def _stacked(value: Value, length: int, dims: Dims) -> Value:
    shape, classes = (length, *value.shape), (dims.fresh(), *value.classes)
    return replace(value, shape=shape, classes=classes)


def _numpy_dtype(dtype: Any) -> np.dtype:
    return np.dtype(dtype) if isinstance(dtype, np.dtype) else np.dtype(np.uint32)
