# SPDX-License-Identifier: Apache-2.0
"""Maps the dims of an operation's inputs to dims of its output.

Owns one rule per family of JAX primitives. A primitive without a rule joins dims of
equal size at equal positions if the ranks agree, which is right for all elementwise
primitives. Does not own the use of the joins (`values.py`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetjax.models.attention.kernel_attention import BACKWARD, FORWARD

Params = Mapping[str, Any]  # of the primitive
Shape = Sequence[int]
Shapes = Sequence[Shape]
Join = tuple[int, int, int]  # (input, its dim, dim of the output)
Joins = Iterable[Join]

# passes of kernel attention: (queries BLNH, keys BLKH, values BLKH, ...) ->
# (output, one number per row BNL), or -> the gradients of queries, keys and values
ATTENTION = frozenset({FORWARD, BACKWARD})
RAGGED = "ragged_dot_general"  # each row times the matrix of its group
_UNRELATED = {"gather", "iota", "rng_bit_generator", "scatter", "scatter-add"}


def joined_dims(
    name: str, params: Params, inputs: Shapes, output: Shape
) -> Sequence[Join]:
    """List the joins between a primitive's inputs and one of its outputs."""
    if name in _UNRELATED:
        return []
    if name in ("argmax", "argmin") or (
        name.startswith("reduce_") and "axes" in params
    ):
        kept = _others(len(inputs[0]), params["axes"])
        return [(0, dim, at) for at, dim in enumerate(kept)]
    rule = _RULES.get(name, _same_place)
    return list(rule(params, inputs, output))


def _same_place(params: Params, inputs: Shapes, output: Shape) -> Joins:
    for number, shape in enumerate(inputs):
        if len(shape) == len(output):
            for dim, (size, out_size) in enumerate(zip(shape, output, strict=True)):
                if size == out_size:
                    yield number, dim, dim


def _broadcast(params: Params, inputs: Shapes, output: Shape) -> Joins:
    for dim, at in enumerate(params["broadcast_dimensions"]):
        if inputs[0][dim] == output[at]:
            yield 0, dim, at


def _transpose(params: Params, inputs: Shapes, output: Shape) -> Joins:
    return ((0, dim, at) for at, dim in enumerate(params["permutation"]))


def _squeeze(params: Params, inputs: Shapes, output: Shape) -> Joins:
    kept = _others(len(inputs[0]), params["dimensions"])
    return ((0, dim, at) for at, dim in enumerate(kept))


def _concatenate(params: Params, inputs: Shapes, output: Shape) -> Joins:
    for number, shape in enumerate(inputs):
        for dim in _others(len(shape), (params["dimension"],)):
            yield number, dim, dim


def _dot(params: Params, inputs: Shapes, output: Shape) -> Joins:
    contracted, batch = params["dimension_numbers"]
    at = len(batch[0])
    for number in (0, 1):
        for out_dim, dim in enumerate(batch[number]):
            yield number, dim, out_dim
        bound = (*contracted[number], *batch[number])
        for dim in _others(len(inputs[number]), bound):
            yield number, dim, at
            at += 1


def ragged_sizes(params: Params, inputs: Shapes) -> tuple[int, int, int]:
    """Return the rows, columns and depth of a ragged product, from traced shapes.

    Each row is multiplied only by the matrix of its own group.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (of_lhs, of_rhs), _ = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    rows = [inputs[0][dim] for dim in _others(len(inputs[0]), of_lhs)]
    columns = [inputs[1][dim] for dim in _others(len(inputs[1]), (*of_rhs, *groups))]
    depth = [inputs[0][dim] for dim in of_lhs]
    return math.prod(rows), math.prod(columns), math.prod(depth)


def _ragged(params: Params, inputs: Shapes, output: Shape) -> Joins:
    """Join rows and columns; if groups divide the depth, they are the first dim."""
    numbers = params["ragged_dot_dimension_numbers"]
    (of_lhs, of_rhs), _ = numbers.dot_dimension_numbers
    at = len(output) - 2
    for number, bound in ((0, of_lhs), (1, (*of_rhs, *numbers.rhs_group_dimensions))):
        for dim in _others(len(inputs[number]), bound):
            yield number, dim, at
            at += 1


def _attention(params: Params, inputs: Shapes, output: Shape) -> Joins:
    """Join gradients with their arrays, the output with the queries."""
    if len(output) == 3:
        return [(0, 0, 0), (0, 2, 1), (0, 1, 2)]
    number = 0 if output == inputs[0] else 1
    return [(number, dim, dim) for dim in range(4)]


def _reshape(params: Params, inputs: Shapes, output: Shape) -> Joins:
    """Join the major dims of the smallest groups of equal size on both sides."""
    (given,) = inputs[:1]
    i = j = 0
    while i < len(given) and j < len(output):
        group, out_group = [i], [j]
        size, out_size = given[i], output[j]
        while size != out_size:
            if size < out_size:
                i += 1
                group.append(i)
                size *= given[i]
            else:
                j += 1
                out_group.append(j)
                out_size *= output[j]
        major, out_major = _major(given, group), _major(output, out_group)
        if major is not None and out_major is not None:
            yield 0, major, out_major
        i, j = i + 1, j + 1


def _major(shape: Shape, group: Sequence[int]) -> int | None:
    return next((dim for dim in group if shape[dim] > 1), None)


def _others(rank: int, without: Sequence[int]) -> list[int]:
    return [dim for dim in range(rank) if dim not in without]


_RULES = {
    **dict.fromkeys(ATTENTION, _attention),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _dot,
    RAGGED: _ragged,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
