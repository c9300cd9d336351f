# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of one stage that continue texts.

Owns for which pieces of texts programs are compiled, and the layout of `kept` on the
stage's devices: the compiler's layout for the keys and values of a first piece, so that
heads stay where their weights are. Does not own the mathematics
(`hetjax/stage/decoding.py`).
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.mesh.axes import replicated
from hetjax.runtime.execution.programs import Compiled, StagePrograms, lowered
from hetjax.stage import decoding as stage
from hetjax.stage.arrays import shardings
from hetjax.stage.decoding import Kept
from hetjax.stage.function import StageFunction, StageParams


@lru_cache(maxsize=64)
def of_size(programs: StagePrograms, num_rows: int, length: int) -> StagePrograms:
    """Return the programs of the same stage for batches of other sizes."""
    width = programs.activation_shape[2:]
    return replace(
        programs,
        tokens_shape=(num_rows, length),
        activation_shape=(num_rows, length, *width),
    )


@dataclass
class TextPrograms:
    """Programs of a stage for texts of up to `num_positions`, by length of a piece.

    `begin` is for the first piece, `decode` for later pieces; call `begin` first. The
    last stage returns logits_V of the first text after position `at` of the piece,
    others the residual stream.
    """

    num_positions: int
    _begin: dict[int, Compiled] = field(default_factory=dict)
    _decode: dict[int, Compiled] = field(default_factory=dict)
    _kept: Any = None  # abstract, with its layout

    def begin(self, programs: StagePrograms) -> Compiled:
        """(params, x, at) -> (y, kept)."""
        length = programs.tokens_shape[1]
        if length not in self._begin:
            self._begin[length] = self._beginning(programs)
        return self._begin[length]

    def decode(self, programs: StagePrograms) -> Compiled:
        """(params, x, at, kept, start) -> (y, kept); `kept` is donated."""
        length = programs.tokens_shape[1]
        if length not in self._decode:
            inputs = (*_inputs(programs), self._kept, _position(programs))
            out = (_out(programs), shardings(self._kept))
            function = partial(_went_on, programs.function)
            self._decode[length] = programs.compiled(
                function, inputs, donate=(3,), out=out
            )
        return self._decode[length]

    def _beginning(self, programs: StagePrograms) -> Compiled:
        function = partial(_begun, programs.function, self.num_positions)
        inputs = _inputs(programs)
        if self._kept is not None:
            out = (_out(programs), shardings(self._kept))
            return programs.compiled(function, inputs, out=out)
        program = lowered(function, inputs, out=(_out(programs), None))
        made = programs.compile(program)
        self._kept = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            program.out_info[1],
            made.output_shardings[1],
        )
        return made


def _begun(
    function: StageFunction,
    num_positions: int,
    params: StageParams,
    x: jax.Array,
    at: jax.Array,
) -> tuple[jax.Array, Kept]:
    kept = stage.rooms(function, params, x.shape[0], num_positions)
    return _went_on(function, params, x, at, kept, jnp.zeros((), jnp.int32))


def _went_on(
    function: StageFunction,
    params: StageParams,
    x: jax.Array,
    at: jax.Array,
    kept: Kept,
    start: jax.Array,
) -> tuple[jax.Array, Kept]:
    y, kept = stage.decode(function, params, x, kept, start)
    if function.last:
        y = stage.logits_after(function, params, y, at)
    return y, kept


def _inputs(programs: StagePrograms) -> tuple[Any, ...]:
    return programs.params, programs.inputs, _position(programs)


def _position(programs: StagePrograms) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(programs.mesh))


def _out(programs: StagePrograms) -> Any:
    if programs.function.last:
        return replicated(programs.mesh)
    return programs.outputs.sharding
