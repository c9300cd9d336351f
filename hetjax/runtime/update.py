# SPDX-License-Identifier: Apache-2.0
"""Optimizer programs of one stage: gradient norm, update, weight copies, first state.

Owns master weights' and optimizer state's layout and the programs over them. Any
Optax transformation that treats leaves separately works: it sees one module of one
layer at a time (stacked runs are vmapped over). Does not own forward and backward
(`programs.py`) nor when an update is allowed (NORM is the commit point).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from hetjax.mesh.axes import master_spec, replicated
from hetjax.mesh.reduction import row_sharding, unpack
from hetjax.runtime.layout import LeafId, Run
from hetjax.runtime.programs import (
    Compiled,
    StagePrograms,
    compiled,
    pack_dim,
    shardings,
    stacked_shape,
    stacked_spec,
)
from hetjax.schedule.action import Group

OptState = tuple[dict[str, Any], ...]  # per run: module name -> Optax state


@dataclass(frozen=True, slots=True)
class GradientGroup:
    """A gradient group of the stage.

    Packed as `rows` rows, or plain accumulator leaves if `rows` is 0, which
    needs one data rank and one holder. `owned` by its first holder, whose NORM counts
    it; `shared` with other holders.
    """

    name: Group
    leaf_ids: tuple[LeafId, ...]
    rows: int
    owned: bool
    shared: bool


@dataclass(frozen=True)
class UpdatePrograms:
    """Programs over the persistent state of a stage."""

    programs: StagePrograms
    optimizer: optax.GradientTransformation
    groups: tuple[GradientGroup, ...]

    @cached_property
    def masters(self) -> Any:
        """fp32 master weights as abstract arrays, one dict per run."""
        mesh = self.programs.mesh
        sizes = {"data": mesh.shape["data"], "tensor": mesh.shape["tensor"]}
        return tuple(
            {
                leaf: jax.ShapeDtypeStruct(
                    stacked_shape(run, param),
                    jnp.float32,
                    sharding=NamedSharding(
                        mesh,
                        stacked_spec(
                            run, master_spec(param.shape, param.logical, **sizes)
                        ),
                    ),
                )
                for leaf, param in run.leaves().items()
            }
            for run in self.programs.graph.runs
        )

    @cached_property
    def opt_state(self) -> Any:
        """Optimizer state as abstract arrays; parameter-shaped leaves lie like masters."""
        state = jax.eval_shape(self._init_opt_state, self.masters)
        whole = replicated(self.programs.mesh)

        def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            master = self.masters[path[0].idx].get(_last_key(path))
            like = master is not None and master.shape == leaf.shape
            sharding = master.sharding if like else whole
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(placed, state)

    @cached_property
    def init_opt_state(self) -> Compiled:
        """(masters) -> optimizer state of step 0."""
        out = shardings(self.opt_state)
        return compiled(self._init_opt_state, (self.masters,), out=out)

    @cached_property
    def copies(self) -> Compiled:
        """(masters) -> compute weights that are not the masters themselves."""
        if not jax.tree.leaves(self._copied):
            return self._copies
        return compiled(self._copies, (self.masters,), out=self._copies_shardings)

    @cached_property
    def square_sum(self) -> Compiled:
        """(gradients) -> sum of squares of the groups this stage owns."""

        def sum_squares(gradients: Any) -> jax.Array:
            arrays = [
                array
                for group, value in zip(self.groups, gradients, strict=True)
                if group.owned
                for array in jax.tree.leaves(value)
            ]
            zero = jnp.zeros((), jnp.float32)
            return sum((jnp.sum(jnp.square(a)) for a in arrays), start=zero)

        out = replicated(self.programs.mesh)
        return compiled(sum_squares, (self.gradients,), out=out)

    @cached_property
    def update(self) -> Compiled:
        """(masters, opt_state, gradients, scale) -> (masters, opt_state, copies)."""

        def step(masters: Any, opt_state: Any, gradients: Any, scale: jax.Array) -> Any:
            grads = self._leaves(gradients)
            grads = jax.tree.map(
                lambda g, m: jax.lax.with_sharding_constraint(g * scale, m.sharding),
                grads,
                self.masters,
            )
            pairs = [
                _update_run(self.optimizer, *run)
                for run in zip(self.programs.graph.runs, masters, opt_state, grads)
            ]
            masters = tuple(master for master, _ in pairs)
            opt_state = tuple(state for _, state in pairs)
            return masters, opt_state, self._copies(masters)

        out = (
            shardings(self.masters),
            shardings(self.opt_state),
            self._copies_shardings,
        )
        inputs = (self.masters, self.opt_state, self.gradients, self.programs.scalar)
        return compiled(step, inputs, donate=(0, 1), out=out)

    @property
    def gradients(self) -> tuple[Any, ...]:
        """What NORM and UPDATE get per group: rows, or accumulator leaves."""
        return tuple(self._gradient(group) for group in self.groups)

    def _gradient(self, group: GradientGroup) -> Any:
        acc, mesh = self.programs.accumulators, self.programs.mesh
        leaves = [acc[run][leaf] for run, leaf in group.leaf_ids]
        if not group.rows:
            return leaves
        packer = self.programs.packer(group.leaf_ids, group.rows)
        return tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=row_sharding(mesh))
            for a in jax.eval_shape(packer, leaves)
        )

    def with_copies(self, masters: Any, copies: Any) -> Any:
        """Compute weights: the copy where there is one, else the master itself."""
        return tuple(m | c for m, c in zip(masters, copies, strict=True))

    def _leaves(self, gradients: Any) -> Any:
        """Gradients per run and leaf, data ranks and holders summed."""
        runs = self.programs.graph.runs
        found: list[dict[str, jax.Array]] = [{} for _ in runs]
        for group, value in zip(self.groups, gradients, strict=True):
            if group.rows:
                shapes = [self.masters[run][leaf].shape for run, leaf in group.leaf_ids]
                dims = [pack_dim(runs[run], leaf) for run, leaf in group.leaf_ids]
                leaves = unpack(value, shapes, dims)
            else:
                leaves = [jnp.sum(leaf, axis=0) for leaf in value]
            for (run, leaf), grad in zip(group.leaf_ids, leaves, strict=True):
                found[run][leaf] = grad
        return tuple(found)

    def _copies(self, masters: Any) -> Any:
        return tuple(
            {leaf: masters[run][leaf].astype(p.dtype) for leaf, p in leaves.items()}
            for run, leaves in enumerate(self._copied)
        )

    @cached_property
    def _copied(self) -> tuple[dict[str, jax.ShapeDtypeStruct], ...]:
        """The compute weights that differ from their master in dtype or layout."""

        def differs(weight: Any, master: Any) -> bool:
            same = weight.sharding.is_equivalent_to(master.sharding, len(master.shape))
            return weight.dtype != master.dtype or not same

        return tuple(
            {leaf: w for leaf, w in run.items() if differs(w, masters[leaf])}
            for run, masters in zip(self.programs.params(), self.masters, strict=True)
        )

    @property
    def _copies_shardings(self) -> Any:
        return shardings(self._copied)

    def _init_opt_state(self, masters: Any) -> OptState:
        return tuple(
            {
                name: _per_unit(run, self.optimizer.init)(params)
                for name, params in _by_module(leaves).items()
            }
            for run, leaves in zip(self.programs.graph.runs, masters, strict=True)
        )


def _update_run(
    optimizer: optax.GradientTransformation,
    run: Run,
    masters: dict[str, jax.Array],
    state: dict[str, Any],
    grads: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    def one(params: Any, state: Any, grads: Any) -> Any:
        # Optax mixes dtypes and ranks, which callers may have forbidden for their own
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    new_masters: dict[str, jax.Array] = {}
    new_state: dict[str, Any] = {}
    by_module = _by_module(grads)
    for name, params in _by_module(masters).items():
        step = _per_unit(run, one)
        params, new_state[name] = step(params, state[name], by_module[name])
        new_masters |= params
    return new_masters, new_state


def _per_unit(run: Run, function: Any) -> Any:
    return jax.vmap(function) if run.stacked else function


def _by_module(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for leaf, value in leaves.items():
        found.setdefault(leaf.partition(".")[0], {})[leaf] = value
    return found


def _last_key(path: Any) -> str:
    return str(getattr(path[-1], "key", ""))
