# SPDX-License-Identifier: Apache-2.0
"""Reads and runs traced programs (jaxprs) operation by operation.

The only file that knows the forms of JAX's programs, and where releases of JAX differ.
Owns inlining of calls and checkpoints, the operands of a loop, and how one operation is
applied. Does not own the uses of all this: the split of a backward pass
(`backward_split.py`), the graphs and counts of `hetjax/costs/`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.extend.core import primitives as lax

from hetjax.models.attention.kernel_attention import BACKWARD, FORWARD

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Var"]

_PRODUCTS = {lax.dot_general_p, lax.conv_general_dilated_p, lax.scatter_add_p}
_LAYOUTS = {
    lax.broadcast_in_dim_p,
    lax.convert_element_type_p,
    lax.iota_p,
    lax.reshape_p,
    lax.squeeze_p,
    lax.transpose_p,
}
_INLINED = {
    lax.jit_p,
    lax.remat_p,
    lax.closed_call_p,
    lax.custom_jvp_call_p,
    lax.custom_vjp_call_p,
}

Values = dict[Hashable, Any]  # by variable


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of a scan's constants and carries; other operands are xs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # as of JAX 0.12
    return len(consts), len(carries)


def called(params: Mapping[str, Any]) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the program that an operation calls, with its constants.

    Calls are jit, checkpoint, custom derivatives; None for an operation that calls
    nothing.
    """
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if isinstance(inner, ClosedJaxpr):
        return inner.jaxpr, inner.consts
    return (inner, ()) if isinstance(inner, Jaxpr) else None


def is_no_choice(eqn: JaxprEqn) -> bool:
    """Return whether the operation selects among operands that are one and the same."""
    cases = eqn.invars[1:]
    same = all(case is cases[0] for case in cases)
    return eqn.primitive is lax.select_n_p and same and not is_literal(cases[0])


def waits_for_all(params: Mapping[str, Any]) -> bool:
    """Return whether a call starts only once all its operands are there.

    The recomputation of a checkpoint does so if JAX asks for a barrier. The compiler of
    JAX 0.10 drops barriers before it orders operations.
    """
    has_barrier = params.get("differentiated", False) and params["prevent_cse"]
    return bool(has_barrier) and jax.__version_info__ >= (0, 11)


def is_scan(eqn: JaxprEqn) -> bool:
    return eqn.primitive is lax.scan_p


def is_product(eqn: JaxprEqn) -> bool:
    """Return whether the operation multiplies matrices, or adds up rows by index."""
    return eqn.primitive in _PRODUCTS


def is_layout(eqn: JaxprEqn) -> bool:
    """Return whether the operation only lays out or converts its operands."""
    return eqn.primitive in _LAYOUTS


def attention_kernel(eqn: JaxprEqn) -> str | None:
    """Return the name of the call if it is a pass of an attention kernel.

    The content of the call belongs to the kernel: nothing in it is a step of the
    program. A call without operands is only what JAX moved out of the kernel's call,
    and out of the loop around it: constants such as masks.
    """
    if eqn.primitive is not lax.jit_p or not eqn.invars:
        return None
    name = eqn.params["name"]
    return name if name in (FORWARD, BACKWARD) else None


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def has_body(eqn: JaxprEqn) -> bool:
    """Return whether the operation contains programs: a call, a loop, a choice."""
    return any(True for _ in bodies(eqn))


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Return the programs that the operation runs."""
    return iter(jaxprs_in_params(eqn.params))


def inlined(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Return the function with calls and checkpoints inlined, inside loops too.

    Attention kernels stay calls.
    """

    def run(*inputs: Any) -> list[Any]:
        env: Values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for eqn in closed.jaxpr.eqns:
            values = read(env, eqn.invars)
            if eqn.primitive in _INLINED and not attention_kernel(eqn):
                made = inlined(_called(eqn))(*values)
            elif is_scan(eqn):
                made = _inlined_scan(Scan(eqn), values)
            else:
                made = applied(eqn, values)
            env |= dict(zip(eqn.outvars, made, strict=True))
        return read(env, closed.jaxpr.outvars)

    return run


def _called(eqn: JaxprEqn) -> ClosedJaxpr:
    inner = called(eqn.params)
    assert inner is not None, eqn.primitive
    return ClosedJaxpr(*inner)


def _inlined_scan(scan: "Scan", values: list[Any]) -> list[Any]:
    body = inlined(scan.eqn.params["jaxpr"])
    num_consts, num_carries = len(scan.consts), len(scan.carries)
    consts, values = values[:num_consts], values[num_consts:]

    def run_body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        made = body(*consts, *carry, *x)
        return made[:num_carries], made[num_carries:]

    carry, ys = scan.run(run_body, values[:num_carries], values[num_carries:])
    return [*carry, *ys]


Pair = tuple[Any, Any]  # (name outside, name inside) of one operand of a loop


class Scan:
    """A scan with its operands by kind: carries in, carries out, stacks in and out."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.eqn, closed = eqn, eqn.params["jaxpr"]
        self.body: Jaxpr = closed.jaxpr
        constants = zip(self.body.constvars, closed.consts, strict=True)
        self.constants: Values = dict(constants)
        num_consts, num_carries = scan_counts(eqn.params)
        inputs: list[Pair] = list(zip(eqn.invars, self.body.invars, strict=True))
        outputs: list[Pair] = list(zip(eqn.outvars, self.body.outvars, strict=True))
        self.consts, inputs = inputs[:num_consts], inputs[num_consts:]
        self.carries, self.xs = inputs[:num_carries], inputs[num_carries:]
        self.carried, self.ys = outputs[:num_carries], outputs[num_carries:]

    def run(self, body: Any, carry: list[Any], xs: list[Any]) -> Any:
        """Scan another body with the same length, direction and unrolling."""
        options = ("length", "reverse", "unroll")
        chosen = {name: self.eqn.params[name] for name in options}
        return jax.lax.scan(body, carry, xs, **chosen)


def variables(atoms: Iterable[Any]) -> set[Any]:
    """Return the operands that are no literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def among(atom: Any, names: set[Any]) -> bool:
    """Return whether an operand is one of these variables; literals never are."""
    return not isinstance(atom, Literal) and atom in names


def read(env: Values, atoms: Iterable[Any]) -> list[Any]:
    """Return the values of operands."""
    return [a.val if isinstance(a, Literal) else env[a] for a in atoms]


def applied(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of one operation."""
    with eqn.ctx.manager:
        made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(made) if eqn.primitive.multiple_results else [made]
