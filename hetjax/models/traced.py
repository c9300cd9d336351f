# SPDX-License-Identifier: Apache-2.0
"""Traced programs (jaxprs): the forms that differ between releases of JAX.

Whoever reads jaxprs asks here; that and `jax.extend.core` is all that there is. Does
not own what is done with them (`counts.py`, `hetjax/costs/`, `hetjax/runtime/`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Give the numbers of a scan's constants and carries; its other operands are xs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # as of JAX 0.12
    return len(consts), len(carries)


def called(params: Mapping[str, Any]) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Give what a call calls (jit, checkpoint, custom derivatives), with constants.

    None for an operation that calls nothing.
    """
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if isinstance(inner, ClosedJaxpr):
        return inner.jaxpr, inner.consts
    return (inner, ()) if isinstance(inner, Jaxpr) else None


def waits_for_all(params: Mapping[str, Any]) -> bool:
    """Say whether a call begins when all that it is given is there.

    So does what a checkpoint makes again, where JAX asks for a barrier. The compiler
    of JAX 0.10 forgets barriers before it puts operations in order.
    """
    has_barrier = params.get("differentiated", False) and params["prevent_cse"]
    return bool(has_barrier) and jax.__version_info__ >= (0, 11)
