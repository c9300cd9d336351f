# SPDX-License-Identifier: Apache-2.0
"""From a plan and a model to what each stage holds: runs, groups, holders.

Owns the names: a run's leaves, the gradient groups they belong to, who holds a group,
who saves what.
Does not own arrays (`state.py`) nor programs (`programs.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hetjax.costs.runs import tied_holders
from hetjax.models.model import AbstractParam, Model, ModuleSpec, abstract_params
from hetjax.plans.plan import LayerRange, Plan, Stage, segments, segments_of
from hetjax.schedule.action import Group, StageKey

LeafId = tuple[int, str]  # (run index within the stage, leaf name within the run)


@dataclass(frozen=True, slots=True)
class Run:
    """Equal consecutive units of one segment; stacked on dim 0 if more than one.

    A unit is the neighbouring modules of one block. A leaf is named
    `module.parameter`. A run that holds a tied parameter for another stage's sake
    has `only` set to that leaf, and is never called.
    """

    units: tuple[tuple[ModuleSpec, ...], ...]
    only: str | None = None

    @property
    def stacked(self) -> bool:
        return len(self.units) > 1

    def leaves(self) -> dict[str, AbstractParam]:
        """Shape and logical axes of one unit's parameters by leaf name."""
        named = {
            f"{module.name}.{name}": param
            for module in self.units[0]
            for name, param in abstract_params(module).items()
        }
        return named if self.only is None else {self.only: named[self.only]}

    def path(self, leaf: str, unit: int) -> str:
        """The full path of a leaf's parameter in one unit: its key in checkpoints."""
        module_name, _, parameter = leaf.partition(".")
        module = next(m for m in self.units[unit] if m.name == module_name)
        return f"{module.path}.{parameter}"

    @property
    def unit_size(self) -> int:
        """Number of parameters of a unit."""
        return sum(math.prod(param.shape) for param in self.leaves().values())

    def name_of(self, unit: int) -> str:
        """What tells a unit from all others, in any stage that holds it."""
        return self.units[unit][0].path

    def kind(self) -> "Run":
        """The same run without paths: equal kinds compile to the same program."""
        kinds = tuple(replace(m, path=m.name) for m in self.units[0])
        return Run((kinds,) * len(self.units), self.only)


@dataclass(frozen=True, slots=True)
class StageRuns:
    """What one stage holds: its runs in layer order, then tied parameters."""

    runs: tuple[Run, ...]
    groups: dict[Group, tuple[LeafId, ...]]  # gradient group -> leaves, highest first

    def leaf_of(self, path: str) -> LeafId:
        """Where the stage holds the parameter with this full path."""
        return next(
            (index, leaf)
            for index, run in enumerate(self.runs)
            for unit in range(len(run.units))
            for leaf in run.leaves()
            if run.path(leaf, unit) == path
        )


@dataclass(frozen=True)
class Layout:
    """The runs of all stages and the holders of all gradient groups."""

    plan: Plan
    model: Model

    @cached_property
    def stages(self) -> dict[StageKey, StageRuns]:
        return {(r, s): self._runs((r, s), stage) for r, s, stage in self.plan.stages()}

    @cached_property
    def tied(self) -> dict[str, tuple[StageKey, ...]]:
        """Full path of each tied parameter -> the stages that hold it."""
        return tied_holders(self.plan, self.model)

    @cached_property
    def holders(self) -> dict[Group, tuple[StageKey, ...]]:
        """Gradient group -> the stages that hold it, in replica order."""
        found: dict[Group, list[StageKey]] = {}
        for stage_id, runs in self.stages.items():
            for group in runs.groups:
                found.setdefault(group, []).append(stage_id)
        return {group: tuple(ids) for group, ids in found.items()}

    @cached_property
    def savers(self) -> dict[str, StageKey]:
        """Name of each unit -> the stage that saves it: the nodes share the load.

        The largest units go first, each to the node that has least to save so far.
        """
        holders: dict[str, list[StageKey]] = {}
        sizes: dict[str, int] = {}
        for stage_id, held in self.stages.items():
            for run in held.runs:
                for unit in range(len(run.units) if run.only is None else 0):
                    holders.setdefault(run.name_of(unit), []).append(stage_id)
                    sizes[run.name_of(unit)] = run.unit_size
        nodes = {(r, s): stage.node for r, s, stage in self.plan.stages()}
        load = dict.fromkeys(nodes.values(), 0)
        found = {}
        for name in sorted(holders, key=lambda name: (-sizes[name], name)):
            saver = min(holders[name], key=lambda stage_id: load[nodes[stage_id]])
            load[nodes[saver]] += sizes[name]
            found[name] = saver
        return found

    def _modules(self, layers: LayerRange) -> tuple[ModuleSpec, ...]:
        return tuple(m for x in self.model.layers[slice(*layers)] for m in x.modules)

    def _owns(self, stage: Stage, path: str) -> bool:
        modules = self._modules(stage.layers)
        return any(path.startswith(module.path + ".") for module in modules)

    def _runs(self, stage_id: StageKey, stage: Stage) -> StageRuns:
        runs: list[Run] = []
        groups: dict[Group, tuple[LeafId, ...]] = {}
        for lo, hi in segments_of(stage, segments(self.plan)):
            fresh = list(_runs_of(self._modules((lo, hi))))
            ids = _leaf_ids(fresh, first=len(runs), tied=set(self.tied))
            runs += fresh
            if ids:
                groups[lo, hi] = ids
        groups = dict(reversed(groups.items()))
        for path, ids in self.tied.items():
            if stage_id not in ids:
                continue
            if not self._owns(stage, path):
                runs.append(self._tied_run(path))
            groups[path] = (StageRuns(tuple(runs), {}).leaf_of(path),)
        return StageRuns(tuple(runs), groups)

    def _tied_run(self, path: str) -> Run:
        owner = next(m for m in self.model.modules if path.startswith(m.path + "."))
        return Run(((owner,),), only=owner.name + path.removeprefix(owner.path))


def _runs_of(modules: tuple[ModuleSpec, ...]) -> Iterator[Run]:
    """Units = modules of one block; equal consecutive units make one run."""
    units: list[tuple[ModuleSpec, ...]] = []
    for module in modules:
        if units and units[-1][0].block == module.block:
            units[-1] += (module,)
        else:
            units.append((module,))
    run: list[tuple[ModuleSpec, ...]] = []
    for unit in units:
        if run and Run((unit,)).kind() != Run((run[0],)).kind():
            yield Run(tuple(run))
            run = []
        run.append(unit)
    yield Run(tuple(run))


def _leaf_ids(runs: list[Run], first: int, tied: set[str]) -> tuple[LeafId, ...]:
    return tuple(
        (first + index, leaf)
        for index, run in enumerate(runs)
        for leaf in run.leaves()
        if run.path(leaf, 0) not in tied
    )
