# SPDX-License-Identifier: Apache-2.0
"""Splits a backward pass in two: what its first outputs need, and the rest.

Owns the split of a stage's backward pass into I (the gradient of the stage's input) and
W (those of its weights). It works on the traced program (the jaxpr), so it holds for
any module and any remat choice:

* the second half is the last matrix product before each of the other outputs, and what
  follows from it: sums over tokens and products on the way belong to the first half;
* a loop that the first half needs is cut inside, iteration by iteration;
* values of the first half that the second reads cross over, except those that a change
  of layout recomputes from something no larger.

Nothing else is computed twice. Does not own the functions that are split
(`function.py`), the forms of traced programs (`jaxprs.py`) nor compiled programs.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from hetjax.stage.jaxprs import (
    Jaxpr,
    JaxprEqn,
    Pair,
    Scan,
    Values,
    Var,
    among,
    applied,
    has_body,
    inlined,
    is_layout,
    is_product,
    is_scan,
    read,
    variables,
)


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """Two functions that together, called in turn, are one.

    `first(*inputs)` returns (first outputs, crossing values), `second(kept, crossing)`
    the other outputs; `kept` are the positions of the inputs that it still reads.
    """

    first: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
    second: Callable[..., list[jax.Array]]
    kept: tuple[int, ...]


def split_backward(
    function: Callable[..., Sequence[Any]], num_first: int, inputs: Sequence[Any]
) -> BackwardSplit:
    """Split a function of flat (abstract) inputs; `num_first` outputs come first."""
    closed = jax.make_jaxpr(inlined(jax.make_jaxpr(function)(*inputs)))(*inputs)
    jaxpr = closed.jaxpr
    constants: Values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    outputs, others = jaxpr.outvars[:num_first], jaxpr.outvars[num_first:]
    parts = _parts(jaxpr, variables(outputs), late=set())
    cut = _cut(parts, outputs, others, own=[])
    kept = tuple(i for i, var in enumerate(jaxpr.invars) if var in cut.second.reads)

    def first(*values: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        env = constants | dict(zip(jaxpr.invars, values, strict=True))
        cut.first.run(env)
        return read(env, outputs), read(env, cut.crossing)

    def second(
        values: Sequence[jax.Array], crossing: Sequence[jax.Array]
    ) -> list[jax.Array]:
        names = [*(jaxpr.invars[i] for i in kept), *cut.crossing]
        env = constants | dict(zip(names, [*values, *crossing], strict=True))
        cut.second.run(env)
        return read(env, others)

    return BackwardSplit(first, second, kept)


@dataclass(frozen=True, slots=True)
class _Part:
    """The work of one half on one operation."""

    makes: Sequence[Hashable] = ()
    reads: frozenset[Hashable] = frozenset()
    run: Callable[[Values], None] = lambda env: None


@dataclass(frozen=True, slots=True)
class _Half:
    """Parts in order, and what they read that none of them makes."""

    parts: tuple[_Part, ...]
    reads: set[Hashable]

    def run(self, env: Values) -> None:
        for part in self.parts:
            part.run(env)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The halves of a jaxpr; `crossing` goes from the first to the second."""

    first: _Half
    second: _Half
    crossing: list[Hashable]


_Parts = list[tuple[_Part, _Part]]  # (first, second) of each operation


def _parts(jaxpr: Jaxpr, wanted: set[Any], late: set[Any]) -> _Parts:
    """Split each operation between the halves; add to `late` what only second has."""
    needed, parts = _needed(jaxpr, wanted), []
    for eqn in jaxpr.eqns:
        serves_first = not needed.isdisjoint(eqn.outvars)
        if serves_first and is_scan(eqn):
            first, second = _cut_scan(eqn, needed, late)
        else:
            reads = frozenset(variables(eqn.invars))
            whole = _Part(eqn.outvars, reads, partial(_apply, eqn))
            waits = _is_heavy(eqn) or not late.isdisjoint(reads)
            first = whole if serves_first or not waits else _Part()
            second = whole if first is not whole or _is_made_again(eqn) else _Part()
        late |= set(second.makes) - set(first.makes)
        parts.append((first, second))
    return parts


def _cut(
    parts: _Parts, outputs: Iterable[Any], others: Iterable[Any], own: Iterable[Var]
) -> _Cut:
    """Cut for these outputs of each half; only the first has the inputs `own`."""
    second = _half([late for _, late in parts], variables(others))
    made = [key for early, _ in parts for key in early.makes]
    crossing = [key for key in (*own, *made) if key in second.reads]
    first = _half([early for early, _ in parts], {*variables(outputs), *crossing})
    return _Cut(first, second, crossing)


def _half(parts: Sequence[_Part], outputs: set[Hashable]) -> _Half:
    """Return only the parts that the outputs need."""
    needed, taken = set(outputs), []
    for part in reversed(parts):
        if not needed.isdisjoint(part.makes):
            taken.append(part)
            needed -= set(part.makes)
            needed |= part.reads
    return _Half(tuple(taken[::-1]), needed)


def _cut_scan(eqn: JaxprEqn, needed: set[Any], late: set[Any]) -> tuple[_Part, _Part]:
    """Return two scans; stacks of what crosses in each iteration connect them."""
    scan = Scan(eqn)
    early, wanted = _early_carries(scan, needed)
    inputs = scan.consts + scan.carries + scan.xs
    body_late: set[Any] = {inner for outer, inner in inputs if among(outer, late)}
    body_late |= {own for i, (_, own) in enumerate(scan.carries) if i not in early}
    parts = _parts(scan.body, wanted, body_late)

    def side(is_late: bool) -> tuple[list[Pair], list[Pair], list[Pair]]:
        own = [i for i in range(len(scan.carries)) if (i not in early) == is_late]
        return (
            [scan.carries[i] for i in own],
            [scan.carried[i] for i in own],
            [y for y in scan.ys if among(y[1], body_late) == is_late],
        )

    first, second = side(False), side(True)
    outputs, others = ([inner for _, inner in s[1] + s[2]] for s in (first, second))
    cut = _cut(parts, outputs, others, own=[inner for _, inner in first[0]])
    crossing = [(object(), key) for key in cut.crossing]  # a name for each stack
    return (
        _scanned(scan, cut.first, *first, takes=[], gives=crossing),
        _scanned(scan, cut.second, *second, takes=crossing, gives=[]),
    )


def _scanned(
    scan: Scan,
    half: _Half,
    carries: list[Pair],
    carried: list[Pair],
    ys: list[Pair],
    *,
    takes: list[Pair],
    gives: list[Pair],
) -> _Part:
    """Return a half of a loop's body as a separate loop."""
    consts = [pair for pair in scan.consts if pair[1] in half.reads]
    xs = [pair for pair in scan.xs if pair[1] in half.reads] + takes
    stacks = ys + gives

    def run(env: Values) -> None:
        shared = scan.constants | _passed(consts, read(env, _outer(consts)))

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            own = shared | _passed(carries, carry) | _passed(xs, x)
            half.run(own)
            return read(own, _inner(carried)), read(own, _inner(stacks))

        start, given = read(env, _outer(carries)), read(env, _outer(xs))
        carry, made = scan.run(body, start, given)
        env |= dict(zip(_outer(carried + stacks), [*carry, *made], strict=True))

    reads = frozenset(variables(_outer(consts + carries + xs)))
    return _Part(_outer(carried + stacks), reads, run)


def _needed(jaxpr: Jaxpr, wanted: set[Var]) -> set[Var]:
    """Return the wanted variables, operands of last products, and what makes them."""
    needed = set(wanted)
    for eqn in reversed(jaxpr.eqns):
        is_last = needed.isdisjoint(eqn.outvars)
        if is_last and not _is_heavy(eqn):
            continue
        if is_last or not is_scan(eqn):
            needed |= variables(eqn.invars)
            continue
        scan = Scan(eqn)
        early, inner_wanted = _early_carries(scan, needed)
        inner = _needed(scan.body, inner_wanted)
        needed |= variables(out for out, own in scan.consts + scan.xs if own in inner)
        needed |= variables(scan.carries[i][0] for i in early)
    return needed


def _early_carries(scan: Scan, needed: set[Var]) -> tuple[set[int], set[Var]]:
    """Return the carries, and the outputs of the body, that the first half needs."""
    ys = variables(inner for outer, inner in scan.ys if outer in needed)
    early = {i for i, (outer, _) in enumerate(scan.carried) if outer in needed}
    while True:
        wanted = ys | variables(scan.carried[i][1] for i in early)
        reads = _needed(scan.body, wanted)
        more = {i for i, (_, own) in enumerate(scan.carries) if own in reads}
        if more <= early:
            return early, wanted
        early |= more


def _is_heavy(eqn: JaxprEqn) -> bool:
    return has_body(eqn) or is_product(eqn)


def _is_made_again(eqn: JaxprEqn) -> bool:
    """Return whether to recompute the result rather than keep it."""
    if not is_layout(eqn):
        return False
    reads = sum(map(_num_bytes, variables(eqn.invars)))
    return reads <= sum(map(_num_bytes, eqn.outvars))


def _num_bytes(var: Var) -> int:
    aval: Any = var.aval
    return aval.size * aval.dtype.itemsize


def _apply(eqn: JaxprEqn, env: Values) -> None:
    made = applied(eqn, read(env, eqn.invars))
    env |= dict(zip(eqn.outvars, made, strict=True))


def _outer(pairs: list[Pair]) -> list[Any]:
    return [outer for outer, _ in pairs]


def _inner(pairs: list[Pair]) -> list[Any]:
    return [inner for _, inner in pairs]


def _passed(pairs: list[Pair], values: list[Any]) -> Values:
    return dict(zip(_inner(pairs), values, strict=True))
