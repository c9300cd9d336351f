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

from hetjax.comm.reduction import row_sharding, unpack
from hetjax.mesh.axes import master_spec, replicated
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

    def touches(self, run: int) -> bool:
        """Whether the run has a leaf of this group."""
        return any(at == run for at, _ in self.leaf_ids)


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
        """Abstract optimizer state; leaves shaped like a master lie like it."""
        state = jax.eval_shape(self._init_opt_state, self.masters)
        whole = replicated(self.programs.mesh)

        def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            master = self.masters[path[0].idx].get(_last_key(path), leaf)
            same = master is not leaf and master.shape == leaf.shape
            sharding = master.sharding if same else whole
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
        return compiled(self._copies, (self.masters,), out=shardings(self._copied))

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
    def run_updates(self) -> list[Compiled]:
        """Per run (masters, opt_state, gradients, scale) -> the first two, copies.

        One program per run, not per stage: all holders of a segment have the same
        runs, so that they compile the same arithmetic and their weights stay equal to
        the last bit (tested on CPU devices, for optimizers without reductions).
        """
        return [self._run_update(run) for run in range(len(self.masters))]

    def update(self, masters: Any, opt_state: Any, gradients: Any, scale: Any) -> Any:
        """(masters, opt_state, copies) after one step; masters, opt_state donated."""
        done = [
            update(masters[run], opt_state[run], self._of_run(run, gradients), scale)
            for run, update in enumerate(self.run_updates)
        ]
        return tuple(zip(*done, strict=True))

    def _run_update(self, run: int) -> Compiled:
        def step(masters: Any, opt_state: Any, gradients: Any, scale: jax.Array) -> Any:
            grads = self._leaves(run, gradients)
            grads = jax.tree.map(
                lambda g, m: jax.lax.with_sharding_constraint(g * scale, m.sharding),
                grads,
                abstract,
            )
            # keeps the data movement above out of the optimizer's kernels, which
            # would otherwise be fused, and rounded, differently on unlike meshes
            grads = jax.lax.optimization_barrier(grads)
            of_run = self.programs.graph.runs[run]
            masters, opt_state = _update_run(
                self.optimizer, of_run, masters, opt_state, grads
            )
            return masters, opt_state, self._run_copies(run, masters)

        abstract = self.masters[run]
        inputs = (
            abstract,
            self.opt_state[run],
            self._of_run(run, self.gradients),
            self.programs.scalar,
        )
        out = (*map(shardings, inputs[:2]), shardings(self._copied[run]))
        options = self._exact_arithmetic(run)
        return compiled(step, inputs, donate=(0, 1), out=out, options=options)

    def _exact_arithmetic(self, run: int) -> dict[str, Any]:
        """Compiler options that round every operation as written, for shared weights.

        XLA turns a / b into a * (1 / b), and LLVM a * b + c into one rounding, or not,
        depending on the shapes around: holders with unlike meshes would drift apart by
        last bits, and a resumed run, whose holders all restore one copy, from an
        unbroken one. This makes an update four times slower on a CPU (35 against 9 ms
        for 8 M parameters). Not set on GPU: nothing was tried there.
        """
        on_cpu = self.programs.mesh.devices.flat[0].platform == "cpu"
        if not on_cpu or not any(g.shared and g.touches(run) for g in self.groups):
            return {}
        return {
            "xla_disable_hlo_passes": "algsimp",
            "xla_backend_optimization_level": 0,
        }

    def _of_run(self, run: int, gradients: Any) -> list[Any]:
        """The gradients of the groups that have a leaf in the run."""
        return [
            value
            for group, value in zip(self.groups, gradients, strict=True)
            if group.touches(run)
        ]

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

    def _leaves(self, run: int, gradients: list[Any]) -> dict[str, jax.Array]:
        """Gradients of a run by leaf, data ranks and holders summed."""
        groups = [group for group in self.groups if group.touches(run)]
        return {
            leaf: gradient
            for group, value in zip(groups, gradients, strict=True)
            for (at, leaf), gradient in zip(
                group.leaf_ids, self._of_group(group, value), strict=True
            )
            if at == run
        }

    def _of_group(self, group: GradientGroup, value: Any) -> list[jax.Array]:
        if not group.rows:
            return [jnp.sum(leaf, axis=0) for leaf in value]
        runs = self.programs.graph.runs
        shapes = [self.masters[run][leaf].shape for run, leaf in group.leaf_ids]
        dims = [pack_dim(runs[run], leaf) for run, leaf in group.leaf_ids]
        return unpack(value, shapes, dims)

    def _copies(self, masters: Any) -> Any:
        return tuple(self._run_copies(run, own) for run, own in enumerate(masters))

    def _run_copies(self, run: int, masters: Any) -> dict[str, jax.Array]:
        copied = self._copied[run]
        return {leaf: masters[leaf].astype(w.dtype) for leaf, w in copied.items()}

    @cached_property
    def _copied(self) -> Any:
        """The compute weights that differ from their master in dtype or layout."""

        def differs(weight: Any, master: Any) -> bool:
            same = weight.sharding.is_equivalent_to(master.sharding, len(master.shape))
            return weight.dtype != master.dtype or not same

        return tuple(
            {leaf: w for leaf, w in run.items() if differs(w, masters[leaf])}
            for run, masters in zip(self.programs.params(), self.masters, strict=True)
        )

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
