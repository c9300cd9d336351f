# SPDX-License-Identifier: Apache-2.0
"""Compiles a stage's optimizer programs: gradient norm, update, copies, first state.

Owns the layout of master weights and optimizer state, and the programs over them. Any
Optax transformation that treats leaves separately works: it sees one module of one
layer at a time (stacks are vmapped over). Does not own forward and backward
(`programs.py`) nor when an update is allowed (NORM is the commit point).
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from hetjax.comm.reduction import leaf_of_rows, row_sharding, unpacked_rows
from hetjax.mesh.axes import replicated
from hetjax.optimizers import evaluation
from hetjax.optimizers.optimizer import NonElementwise
from hetjax.runtime.execution.programs import Compiled, StagePrograms
from hetjax.runtime.execution.updates.groups import GradientGroup
from hetjax.runtime.execution.updates.leaf_updates import (
    Rule,
    in_eight_bits,
    in_turn,
    scaled,
    updated_by_leaf,
)
from hetjax.runtime.execution.updates.offload import moved, on_their_way, whole_on
from hetjax.runtime.execution.updates.skipped_state import (
    after_skipped_step,
    check_numbers,
)
from hetjax.stage import arrays, eight_bits
from hetjax.stage.partition import BlockStack

# The plain emitters round depending on shapes, whatever the other options; XLA_FLAGS
# may have chosen them. JAX 0.11 has only the fusion emitters.
_EMITTERS = (
    {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
)


@dataclass(frozen=True)
class UpdatePrograms:
    """Programs over the persistent state of a stage."""

    programs: StagePrograms
    optimizer: optax.GradientTransformation
    groups: tuple[GradientGroup, ...]
    host: Mesh | None = None  # of masters and optimizer state, if offloaded

    @cached_property
    def masters(self) -> Any:
        """fp32 master weights as abstract arrays, one dict per stack."""
        return arrays.master_weights(self._stacks, self.home)

    @cached_property
    def opt_state(self) -> Any:
        """Abstract optimizer state, per stack by module; laid out like the masters.

        Raises BadInput for a rule that does not say what skipped steps do to it.
        """
        init = self.optimizer.init
        state = arrays.optimizer_state(self._stacks, self.masters, init)
        for own, masters in zip(state, self.masters, strict=True):
            for name, parameters in arrays.by_module(masters).items():
                check_numbers(own[name], parameters)
        return state

    @property
    def _stacks(self) -> tuple[BlockStack, ...]:
        return self.programs.function.stacks

    @cached_property
    def init_opt_state(self) -> Compiled:
        """(masters) -> optimizer state of step 0."""

        def fresh(masters: Any) -> Any:
            return arrays.fresh_optimizer_state(
                self._stacks, masters, self.optimizer.init
            )

        return self.programs.compiled(
            fresh, (self.masters,), out=arrays.shardings(self.opt_state)
        )

    @cached_property
    def copies(self) -> Compiled:
        """(masters) -> compute weights that are not masters themselves, at `home`."""
        if not jax.tree.leaves(self._copied):
            return self._copies
        out = arrays.shardings(self._copied_at_home)
        return self.programs.compiled(self._copies, (self.masters,), out=out)

    def copied(self, masters: Any) -> Any:
        """Return compute weights that are not the masters themselves, on the stage."""
        return self._on_stage(self.copies(masters))

    @cached_property
    def square_sum(self) -> Compiled:
        """(gradients) -> sum of squares of the groups this stage owns."""

        def sum_squares(gradients: Any) -> jax.Array:
            owned = [
                array
                for group, value in zip(self.groups, gradients, strict=True)
                if group.owned
                for array in jax.tree.leaves(value)
            ]
            zero = jnp.zeros((), jnp.float32)
            return sum((jnp.sum(jnp.square(a)) for a in owned), start=zero)

        out = replicated(self.programs.mesh)
        return self.programs.compiled(sum_squares, (self.gradients,), out=out)

    @cached_property
    def stack_updates(self) -> list[Compiled]:
        """Per stack (masters, opt_state, gradients, scale) -> the first two, copies.

        One program per stack, not per stage: all holders of a segment have the same
        stacks. So they compile the same arithmetic, and their weights stay equal to the
        last bit (tested on CPU devices, for optimizers without reductions).
        """
        return [self._stack_update(index) for index in range(len(self.masters))]

    def update(self, masters: Any, opt_state: Any, gradients: Any, scale: Any) -> Any:
        """Return (masters, opt_state, copies) after a step; donate the first two."""
        if self._is_away:
            gradients = on_their_way(gradients)
            scale = moved(scale, whole_on(self.home, self.programs.scalar))
        done = [
            update(
                masters[index],
                opt_state[index],
                self._at_home(index, self._of_stack(index, gradients)),
                scale,
            )
            for index, update in enumerate(self.stack_updates)
        ]
        masters, opt_state, copies = zip(*done, strict=True)
        return masters, opt_state, self._on_stage(copies)

    @property
    def _is_away(self) -> bool:
        return self.host is not None

    @property
    def home(self) -> Mesh:
        """The mesh of masters and optimizer state."""
        return self.host or self.programs.mesh

    @property
    def _is_on_cpu(self) -> bool:
        return self.home.devices.flat[0].platform == "cpu"

    def _at_home(self, index: int, gradients: Any) -> Any:
        like = self._gradients_at_home[index]
        return moved(gradients, like) if self._is_away else gradients

    def _on_stage(self, copies: Any) -> Any:
        if not self._is_away:
            return copies
        return moved(on_their_way(copies), self._copied)

    @cached_property
    def evaluates_elsewhere(self) -> bool:
        """Whether evaluation uses other weights than training."""
        return evaluation.evaluates_elsewhere(self.opt_state)

    @cached_property
    def evaluation_weights(self) -> Compiled:
        """(masters, opt_state) -> compute weights to evaluate, trained ones only."""

        def found(masters: Any, opt_state: Any) -> Any:
            return tuple(
                self._evaluated(index, own, opt_state[index])
                for index, own in enumerate(masters)
            )

        trained = self.programs.trained
        out = whole_on(self.home, trained) if self._is_away else trained
        given = self.masters, self.opt_state
        return self.programs.compiled(found, given, out=arrays.shardings(out))

    def evaluated(self, masters: Any, opt_state: Any, frozen: Any) -> Any:
        """Return the compute weights to evaluate, on the stage."""
        found = self.evaluation_weights(masters, opt_state)
        if self._is_away:
            found = moved(on_their_way(found), self.programs.trained)
        return arrays.joined_parts(found, frozen)

    def _evaluated(
        self, index: int, masters: dict[str, jax.Array], states: dict[str, Any]
    ) -> dict[str, jax.Array]:
        stack, like = self._stacks[index], self.programs.trained[index]

        def of_unit(params: Any, state: Any) -> Any:
            return evaluation.evaluation_weights(eight_bits.seen(state), params)

        found: dict[str, jax.Array] = {}
        for name, params in arrays.by_module(masters).items():
            found |= arrays.per_unit(stack, of_unit)(params, states[name])
        return {leaf: found[leaf].astype(weight.dtype) for leaf, weight in like.items()}

    def skipped(self, opt_state: Any) -> Any:
        """Return the optimizer state after a step without an update."""
        return after_skipped_step(opt_state)

    def _stack_update(self, index: int) -> Compiled:
        def step(masters: Any, opt_state: Any, gradients: Any, scale: jax.Array) -> Any:
            coded = eight_bits.has_codes(opt_state)
            one = partial(_rule, self.optimizer)
            if whole is not None:
                one = _seeing_all(one, whole)
            if coded:
                one = in_eight_bits(one, stack)
            one = scaled(one, scale)
            if stack.stacked:
                looped = coded or not self._is_on_cpu
                one = partial(in_turn, one) if looped else _at_once(one, whole)
            masters, opt_state = updated_by_leaf(
                one,
                masters,
                opt_state,
                self._leaves(index, gradients),
                lying_like_master,
            )
            return masters, opt_state, self._stack_copies(index, masters)

        def lying_like_master(leaf: str, given: jax.Array) -> jax.Array:
            gradient = self._whole_leaf(index, leaf, given)
            lying = self.masters[index][leaf].sharding
            return jax.lax.with_sharding_constraint(gradient, lying)

        stack, whole = self._stacks[index], self._whole(index)
        inputs = (
            self.masters[index],
            self.opt_state[index],
            self._gradients_at_home[index],
            whole_on(self.home, self.programs.scalar),
        )
        out = (
            *map(arrays.shardings, inputs[:2]),
            arrays.shardings(self._copied_at_home[index]),
        )
        options = self._exact_arithmetic(index)
        return self.programs.compiled(
            step, inputs, donate=(0, 1), out=out, options=options
        )

    def _whole(self, index: int) -> NamedSharding | None:
        """Return how to lay out shared leaves for a rule that sums over them, or None.

        All holders then sum in one order, however their leaves are cut.
        """
        shared = any(g.shared and g.touches(index) for g in self.groups)
        sums = isinstance(self.optimizer, NonElementwise)
        return replicated(self.home) if shared and sums else None

    def _exact_arithmetic(self, index: int) -> dict[str, Any]:
        """Return options that round every operation as written, if weights are shared.

        XLA turns a / b into a * (1 / b), and LLVM may round a * b + c once, depending
        on the shapes around. So holders with unlike meshes would drift apart in their
        last bits. A resumed run would drift away from an uninterrupted one, as all its
        holders restore the same copy. These options make an update four times slower on
        a CPU (35 against 9 ms for 8 M parameters). Only CPUs get them; GPUs were not
        tried.
        """
        on_cpu = self.programs.mesh.devices.flat[0].platform == "cpu"
        if not on_cpu or not any(g.shared and g.touches(index) for g in self.groups):
            return {}
        return {
            "xla_disable_hlo_passes": "algsimp",
            "xla_backend_optimization_level": 0,
            **_EMITTERS,
        }

    def _of_stack(self, index: int, gradients: Any) -> list[Any]:
        """Return the gradients of the groups that have a leaf in the stack."""
        return [
            value
            for group, value in zip(self.groups, gradients, strict=True)
            if group.touches(index)
        ]

    @property
    def gradients(self) -> tuple[Any, ...]:
        """The input of NORM and UPDATE per group: rows, or accumulator leaves."""
        return tuple(self._gradient(group) for group in self.groups)

    def _gradient(self, group: GradientGroup) -> Any:
        acc, mesh = self.programs.accumulators, self.programs.mesh
        leaves = [acc[at][leaf] for at, leaf in group.leaf_ids]
        if not group.rows:
            return leaves
        packer = self.programs.packer(group.leaf_ids, group.rows)
        return tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=row_sharding(mesh))
            for a in jax.eval_shape(packer, leaves)
        )

    @cached_property
    def frozen(self) -> Any:
        """Compute weights that no update changes, as abstract arrays."""
        return arrays.frozen_part(self._stacks, self.programs.params)

    def with_copies(self, masters: Any, copies: Any, frozen: Any) -> Any:
        """Return compute weights: copies, masters without a copy, and frozen ones."""
        trained = arrays.joined_parts(masters, copies)
        return arrays.joined_parts(trained, frozen)

    def _leaves(self, index: int, gradients: list[Any]) -> dict[str, jax.Array]:
        """Return a stack's gradients by leaf: accumulators, or packed rows."""
        groups = [group for group in self.groups if group.touches(index)]
        return {
            leaf: gradient
            for group, value in zip(groups, gradients, strict=True)
            for (at, leaf), gradient in zip(
                group.leaf_ids, self._of_group(group, value), strict=True
            )
            if at == index
        }

    def _of_group(self, group: GradientGroup, value: Any) -> list[jax.Array]:
        if not group.rows:
            return value
        shapes = [self.masters[at][leaf].shape for at, leaf in group.leaf_ids]
        return unpacked_rows(value, shapes)

    def _whole_leaf(self, index: int, leaf: str, gradient: jax.Array) -> jax.Array:
        """Return the gradient of a leaf, summed over data ranks and holders."""
        group = next(g for g in self.groups if (index, leaf) in g.leaf_ids)
        if not group.rows:
            return jnp.sum(gradient, axis=0)
        dim = arrays.pack_dim(self._stacks[index], leaf)
        return leaf_of_rows(gradient, self.masters[index][leaf].shape, dim)

    def _copies(self, masters: Any) -> Any:
        return tuple(
            self._stack_copies(index, own) for index, own in enumerate(masters)
        )

    def _stack_copies(self, index: int, masters: Any) -> dict[str, jax.Array]:
        copied = self._copied[index]
        return {leaf: masters[leaf].astype(w.dtype) for leaf, w in copied.items()}

    @cached_property
    def _copied(self) -> Any:
        """The weights to copy: all trained ones if the masters are elsewhere."""
        if self._is_away:
            return self.programs.trained
        return arrays.copied_weights(self.programs.trained, self.masters)

    @cached_property
    def _copied_at_home(self) -> Any:
        return whole_on(self.home, self._copied) if self._is_away else self._copied

    @cached_property
    def _gradients_at_home(self) -> list[Any]:
        """The gradients that each stack's update gets."""
        found = [self._of_stack(i, self.gradients) for i in range(len(self.masters))]
        return whole_on(self.home, found) if self._is_away else found


def _rule(
    optimizer: optax.GradientTransformation, params: Any, state: Any, grads: Any
) -> Any:
    # Optax mixes dtypes and ranks, which callers may have forbidden in their code
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def _at_once(rule: Rule, whole: NamedSharding | None) -> Rule:
    """Return the step of all units; with `whole`, only one unit is whole at a time."""
    if whole is None:
        return jax.vmap(rule)
    return lambda *given: jax.lax.map(lambda unit: rule(*unit), given)


def _seeing_all(rule: Rule, whole: NamedSharding) -> Rule:
    """Return the rule on arrays that are made whole for it, one unit's at a time."""
    lying = partial(jax.lax.with_sharding_constraint, shardings=whole)

    def on_whole_arrays(*given: Any) -> Any:
        made = rule(*jax.lax.optimization_barrier(jax.tree.map(lying, given)))
        return jax.lax.optimization_barrier(jax.tree.map(lying, made))

    return on_whole_arrays
