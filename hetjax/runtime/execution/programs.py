# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of one stage: forward, backward, fused, evaluation, packing.

Owns ahead-of-time compilation on the stage's mesh: every program is compiled once, on
first use, for fixed shapes and shardings. An executable belongs to its devices. So
equal stages on the same devices share programs: across plans, not within a plan. Does
not own the mathematics (`hetjax/stage/`) nor the optimizer's programs (`update.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hetjax.comm.reduction import Rows, pack, row_sharding
from hetjax.mesh.axes import batch_sharding, replicated
from hetjax.mesh.multihost import to_mesh, value_here
from hetjax.runtime.execution.compiler_options import compiler_options
from hetjax.schedule.programs.action import Op
from hetjax.stage import microbatch as stage
from hetjax.stage.arrays import (
    accumulators,
    compute_weights,
    pack_dim,
    shardings,
    trained_part,
)
from hetjax.stage.backward_split import BackwardSplit, split_backward
from hetjax.stage.function import LossScales, Packed, Residuals, StageFunction
from hetjax.stage.partition import LeafId

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class StagePrograms:
    """The programs of a stage; stages equal in all fields share them.

    `activation_shape` is that of the residual stream of a whole microbatch. Arrays from
    the stages before and after have those stages' dtypes; the program that reads them
    converts them. If the loss is scaled, backwards take the scale. If sequences are
    packed, programs take documents beside x, and one scale for each kind of loss. If
    `deterministic`, the same inputs give the same bits, on GPUs too.
    """

    function: StageFunction
    mesh: Mesh
    tokens_shape: tuple[int, int]
    activation_shape: tuple[int, ...]
    dtype: jnp.dtype
    dtype_before: jnp.dtype
    dtype_after: jnp.dtype
    is_scaled: bool = False
    deterministic: bool = False

    @cached_property
    def params(self) -> Any:
        """Compute weights as abstract arrays, one dict per stack."""
        return compute_weights(self.function.stacks, self.mesh, self.dtype)

    @property
    def inputs(self) -> jax.ShapeDtypeStruct:
        """The stage's input per microbatch: tokens, or the residual stream."""
        return self.tokens if self.function.first else self._stream(self.dtype_before)

    @property
    def given(self) -> Any:
        """`inputs`, with the documents if sequences are packed."""
        return Packed(self.inputs, self.tokens) if self.is_packed else self.inputs

    @property
    def is_packed(self) -> bool:
        return self.function.packed

    @property
    def outputs(self) -> jax.ShapeDtypeStruct:
        """The residual stream that the stage sends on."""
        return self._stream(self.dtype)

    @property
    def output_gradients(self) -> jax.ShapeDtypeStruct:
        """The gradient that the next stage sends back."""
        return self._stream(self.dtype_after)

    def _stream(self, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        sharding = batch_sharding(self.mesh)
        return jax.ShapeDtypeStruct(self.activation_shape, dtype, sharding=sharding)

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        sharding = batch_sharding(self.mesh)
        return jax.ShapeDtypeStruct(self.tokens_shape, jnp.int32, sharding=sharding)

    @property
    def scalar(self) -> jax.ShapeDtypeStruct:
        sharding = replicated(self.mesh)
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)

    @cached_property
    def accumulators(self) -> Any:
        """fp32 gradient sums; dim 0 is the data rank that added them."""
        return accumulators(self.trained)

    @cached_property
    def trained(self) -> Any:
        """The compute weights that have gradients."""
        return trained_part(self.function.stacks, self.params)

    def program(self, op: Op) -> Compiled:
        """Return the program that computes an action."""
        return {
            Op.F: lambda: self.forward,
            Op.B: lambda: self.backward,
            Op.FB: lambda: self.fused,
            Op.I: lambda: self.input_gradient,
            Op.W: lambda: self.weight_gradient,
            Op.E: lambda: self.evaluate,
        }[op]()

    @cached_property
    def _residuals(self) -> Residuals:
        return Residuals()

    @cached_property
    def forward(self) -> Compiled:
        """(params, x) -> (y, saved).

        For the last stage (params, x, targets, loss) -> (loss, saved); loss is donated.
        """
        return self.compile(self._forward_lowered)

    @cached_property
    def _forward_lowered(self) -> jax.stages.Lowered:
        inputs = (self.params, self.given)
        if not self.function.last:
            function = partial(stage.forward, self.function, self._residuals)
            return lowered(function, inputs, out=(self.outputs.sharding, None))
        function = partial(stage.forward_loss, self.function, self._residuals)
        inputs = (*inputs, self.tokens, self.scalar)
        return lowered(function, inputs, donate=(3,), out=(self.scalar.sharding, None))

    def compiled(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        *,
        donate: tuple[int, ...] = (),
        out: Any,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Compile with the stage's options, also for its state and checks."""
        program = lowered(function, inputs, donate=donate, out=out)
        given = dict(options or {})
        for sharding in jax.tree.leaves(out)[:1]:  # none if there is no output
            given |= compiler_options(sharding.mesh, deterministic=self.deterministic)
        return program.compile(compiler_options=given or None)

    def compile(self, program: jax.stages.Lowered) -> Compiled:
        """Compile a program that is lowered to the mesh of the stage."""
        options = compiler_options(self.mesh, deterministic=self.deterministic)
        return program.compile(compiler_options=options or None)

    @property
    def saved(self) -> list[jax.ShapeDtypeStruct]:
        """The residuals of one microbatch, as the compiled forward lays them out."""
        return _laid_out(self._forward_lowered.out_info[1], self.forward)

    @cached_property
    def backward(self) -> Compiled:
        """(params, x, saved, dy, scale, acc) -> (acc, dx); acc is donated.

        As in all backwards, `scale` is None if the loss is not scaled.
        """
        acc = self.accumulators
        return self.compiled(
            partial(stage.backward, self.function, self._residuals),
            (*self._backward_inputs, acc),
            donate=(5,),
            out=(shardings(acc), self._dx_sharding),
        )

    @cached_property
    def input_gradient(self) -> Compiled:
        """(params, x, saved, dy, scale) -> (dx, crossing).

        dy is None on the last stage.
        """
        return self.compile(self._input_gradient_lowered)

    @cached_property
    def _input_gradient_lowered(self) -> jax.stages.Lowered:
        def dx_and_crossing(*inputs: Any) -> tuple[jax.Array, list[jax.Array]]:
            (dx,), crossing = self._split.first(*jax.tree.leaves(inputs))
            return dx, crossing

        out = (self._dx_sharding, None)
        return lowered(dx_and_crossing, self._backward_inputs, out=out)

    @cached_property
    def weight_gradient(self) -> Compiled:
        """(params, half, acc) -> (acc, a zero to wait for); acc is donated."""
        acc, weights = self.accumulators, jax.tree.structure(self.trained)

        def add(params: Any, half: list[jax.Array], acc: Any) -> tuple[Any, jax.Array]:
            read, others = self._kept
            leaves, num_kept = jax.tree.leaves(params), len(others)
            kept = [*(leaves[i] for i in read), *half[:num_kept]]
            grads = self._split.second(kept, half[num_kept:])
            acc = stage.accumulate(acc, jax.tree.unflatten(weights, grads))
            return acc, jnp.zeros((), jnp.float32)

        inputs = (self.params, self.half, acc)
        out = (shardings(acc), self.scalar.sharding)
        return self.compiled(add, inputs, donate=(2,), out=out)

    def kept(self, given: tuple[Any, ...], crossing: list[Any]) -> list[Any]:
        """Return the half of a microbatch: the values that its W needs after its I.

        `given` are I's inputs (x, saved, dy, scale).
        """
        leaves = jax.tree.leaves(given)
        return [*(leaves[i] for i in self._kept[1]), *crossing]

    @cached_property
    def _kept(self) -> tuple[list[int], list[int]]:
        """Which leaves of params, and which of (x, saved, dy, scale), W reads."""
        num_weights = len(jax.tree.leaves(self.params))
        kept = self._split.kept
        others = [i - num_weights for i in kept if i >= num_weights]
        return [i for i in kept if i < num_weights], others

    @cached_property
    def _split(self) -> BackwardSplit:
        """The split backward; its inputs are the leaves of `_backward_inputs`."""
        leaves, tree = jax.tree.flatten(self._backward_inputs)

        def gradients(*leaves: Any) -> list[jax.Array]:
            inputs = jax.tree.unflatten(tree, leaves)
            made = stage.gradients(self.function, self._residuals, *inputs)
            return jax.tree.leaves(made)

        return split_backward(gradients, 1, leaves)

    @cached_property
    def _backward_inputs(self) -> tuple[Any, ...]:
        saved = self.saved  # traced first: fills the residuals' bookkeeping
        dy = None if self.function.last else self.output_gradients
        return self.params, self.given, saved, dy, self._scale

    @property
    def _scale(self) -> Any:
        if self.is_packed:
            return LossScales(self.scalar, self.scalar)
        return self.scalar if self.is_scaled else None

    @property
    def half(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays that live between I and W of one microbatch, as laid out."""
        made = self._input_gradient_lowered.out_info[1]
        crossing = _laid_out(made, self.input_gradient)
        return self.kept(self._backward_inputs[1:], crossing)

    @cached_property
    def fused(self) -> Compiled:
        """(params, x, targets, scale, acc, loss) -> (acc, loss, dx).

        acc and loss are donated.
        """
        acc = self.accumulators
        return self.compiled(
            partial(stage.fused, self.function),
            (self.params, self.given, self.tokens, self._scale, acc, self.scalar),
            donate=(4, 5),
            out=(shardings(acc), self.scalar.sharding, self._dx_sharding),
        )

    @cached_property
    def evaluate(self) -> Compiled:
        """(params, x) -> y; for the last stage (params, x, targets, loss) -> loss."""
        output = partial(stage.evaluate, self.function)
        if not self.function.last:
            inputs = (self.params, self.given)
            return self.compiled(output, inputs, out=self.outputs.sharding)

        def add_loss(params: Any, x: Any, targets: Any, loss: Any) -> Any:
            return loss + output(params, x, targets)

        inputs = (self.params, self.given, self.tokens, self.scalar)
        return self.compiled(add_loss, inputs, donate=(3,), out=self.scalar.sharding)

    @cached_property
    def row_losses(self) -> Compiled:
        """(params, x, targets) -> losses_B of a microbatch, whole (last stage)."""
        inputs = (self.params, self.inputs, self.tokens)
        function = partial(stage.row_losses, self.function)
        return self.compiled(function, inputs, out=replicated(self.mesh))

    @cached_property
    def logits(self) -> Compiled:
        """(params, x, position) -> logits_V of the first sequence (last stage)."""
        whole = replicated(self.mesh)
        position = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        function = partial(stage.logits, self.function)
        return self.compiled(function, (self.params, self.given, position), out=whole)

    def last_logits(self, params: Any, x: Any, position: int) -> np.ndarray:
        """Return logits_V at a position of the first sequence, on the host.

        Only for the last stage.
        """
        at = to_mesh(np.int32(position), replicated(self.mesh))
        return value_here(self.logits(params, x, at)).astype(np.float32, copy=False)

    @cached_property
    def zeros(self) -> Compiled:
        """() -> (acc, loss), both zero."""
        abstract = (self.accumulators, self.scalar)
        make = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)  # noqa: E731
        return self.compiled(make, (), out=shardings(abstract))

    def packer(self, leaf_ids: tuple[LeafId, ...], rows: int) -> Compiled:
        """Return a traceable (leaves of acc) -> rows_DN arrays, data ranks summed."""
        stacks, num_devices = self.function.stacks, self.mesh.devices.size
        dims = [pack_dim(stacks[at], leaf) for at, leaf in leaf_ids]

        def packed(leaves: Sequence[jax.Array]) -> Rows:
            return pack([jnp.sum(x, axis=0) for x in leaves], dims, rows, num_devices)

        return packed

    def pack(self, leaf_ids: tuple[LeafId, ...], rows: int) -> Compiled:
        """Return the program (leaves of acc) -> rows_DN arrays, ready for exchange."""
        if (leaf_ids, rows) not in self._packs:
            leaves = [self.accumulators[at][leaf] for at, leaf in leaf_ids]
            packer, out = self.packer(leaf_ids, rows), row_sharding(self.mesh)
            self._packs[leaf_ids, rows] = self.compiled(packer, (leaves,), out=out)
        return self._packs[leaf_ids, rows]

    @cached_property
    def _packs(self) -> dict[tuple[tuple[LeafId, ...], int], Compiled]:
        return {}

    @property
    def _dx_sharding(self) -> NamedSharding:
        return (replicated if self.function.first else batch_sharding)(self.mesh)


def _laid_out(made: Any, program: Compiled) -> list[jax.ShapeDtypeStruct]:
    """Return the second output of a program, as its compiled form lays it out."""
    layouts = program.output_shardings[1]  # pyright: ignore
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        for a, sharding in zip(made, layouts, strict=True)
    ]


def lowered(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    donate: tuple[int, ...] = (),
    out: Any,
) -> jax.stages.Lowered:
    program = jax.jit(function, donate_argnums=donate, out_shardings=out)
    traced = program.trace(*inputs)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own bf16 attention needs it
        return traced.lower()
