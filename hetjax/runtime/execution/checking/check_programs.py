# SPDX-License-Identifier: Apache-2.0
"""Compiles programs that check a stage's numbers: finiteness and digests.

Owns what holders of a gradient group compare: the weights, if an update gives all
holders the same bits; otherwise the summed gradients, from which the weights are
computed and which always have the same bits (`hetjax/comm/reduction.py`). Does not own
the arithmetic (`digests.py`) nor the judgement (`checks.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from hetjax.mesh.axes import replicated
from hetjax.mesh.multihost import to_mesh
from hetjax.plans.plan import Group
from hetjax.runtime.execution.checking.digests import digests, is_finite
from hetjax.runtime.execution.programs import Compiled
from hetjax.runtime.execution.updates.groups import GradientGroup
from hetjax.runtime.execution.updates.update import UpdatePrograms
from hetjax.stage import arrays


@dataclass(frozen=True)
class CheckPrograms:
    """Programs over the weights and gradients of a stage that only read them."""

    updates: UpdatePrograms

    @cached_property
    def is_finite(self) -> Compiled:
        """(masters) -> whether all of them are finite."""
        abstract = jax.tree.leaves(self.updates.masters)
        whole = replicated(self.updates.home)
        if not abstract:
            return lambda masters: to_mesh(jax.numpy.bool_(True), whole)
        given = (self.updates.masters,)
        specs = arrays.shardings(abstract)
        check = lambda masters: is_finite(jax.tree.leaves(masters), specs)  # noqa: E731
        return self.updates.programs.compiled(check, given, out=whole)

    def digests(
        self, masters: Any, gradients: Any = None
    ) -> tuple[tuple[Group, ...], tuple[jax.Array, ...]]:
        """Return the groups that other stages hold, too, with digests, uint32[N, 2].

        Without `gradients`, only the groups whose weights are compared.
        """
        names, found = list[Group](), list[jax.Array]()
        if self.weight_digests is not None:
            names += [group.name for group in self._of_weights]
            found.append(self.weight_digests(masters))
        if self.gradient_digests is not None and gradients is not None:
            names += [group.name for group in self._of_gradients]
            found.append(self.gradient_digests(gradients))
        return tuple(names), tuple(found)

    @cached_property
    def weight_digests(self) -> Compiled | None:
        """(masters) -> uint32[N, 2] of the groups whose weights are compared."""

        def of_groups(masters: Any) -> Any:
            return [[masters[at][leaf] for at, leaf in ids] for ids in leaf_ids]

        leaf_ids = [group.leaf_ids for group in self._of_weights]
        return self._compiled(of_groups, self.updates.masters, self.updates.home)

    @cached_property
    def gradient_digests(self) -> Compiled | None:
        """(gradients) -> uint32[N, 2] of the groups whose sums are compared."""

        def of_groups(gradients: Any) -> Any:
            by_group = zip(self.updates.groups, gradients, strict=True)
            return [list(rows) for group, rows in by_group if group in compared]

        compared = self._of_gradients
        of_stage = self.updates.programs.mesh
        return self._compiled(of_groups, self.updates.gradients, of_stage)

    def _compiled(self, of_groups: Any, abstract: Any, mesh: Mesh) -> Compiled | None:
        found = of_groups(abstract)
        if not found:
            return None
        specs = arrays.shardings(found)
        return self.updates.programs.compiled(
            lambda given: digests(of_groups(given), specs),
            (abstract,),
            out=replicated(mesh),
        )

    @property
    def _of_weights(self) -> list[GradientGroup]:
        return [g for g in self.updates.groups if g.shared and g.is_exact]

    @property
    def _of_gradients(self) -> list[GradientGroup]:
        return [g for g in self.updates.groups if g.shared and not g.is_exact]
