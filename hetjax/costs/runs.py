# SPDX-License-Identifier: Apache-2.0
"""What one stage holds and calls: runs of equal units, and tied parameters of others.

A unit is the neighbouring modules of one block; equal consecutive units of a segment
make one run, which a stage scans. Owns how a plan's stage falls into runs, without
paths, so that equal stages have equal runs. Does not own what runs cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hetjax.costs.costs import StageKey
from hetjax.models.model import AbstractParam, Model, ModuleSpec, abstract_params
from hetjax.plans.plan import LayerRange, Plan, Stage, segments, segments_of

Unit = tuple[ModuleSpec, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`num_units` equal units; stacked and scanned if there are several."""

    unit: Unit
    num_units: int = 1

    @property
    def stacked(self) -> bool:
        return self.num_units > 1

    def params(self) -> dict[str, AbstractParam]:
        """Give one unit's parameters by `module.parameter`."""
        return {
            f"{module.name}.{name}": param
            for module in self.unit
            for name, param in abstract_params(module).items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRuns:
    """All that a stage holds.

    `tied` says where the tied parameters that its modules use are: full path -> index
    of the run and leaf name. Those in `borrowed` belong to a module of another stage;
    the stage holds a copy, found under the index after the last run by its path.
    """

    runs: tuple[Run, ...]
    tied: tuple[tuple[str, tuple[int, str]], ...] = ()
    borrowed: tuple[tuple[str, AbstractParam], ...] = ()
    first: bool = False
    last: bool = False


def stage_runs(plan: Plan, model: Model, stage: Stage) -> StageRuns:
    """Find the runs of a stage; a plan's segments cut them."""
    return runs_of(model, segments_of(stage, segments(plan)))


def runs_of(model: Model, ranges: Sequence[LayerRange]) -> StageRuns:
    """Find the runs of neighbouring layer ranges, each cut from the next."""
    layers = (ranges[0][0], ranges[-1][1])
    runs: list[Run] = []
    held: dict[str, tuple[int, str]] = {}
    for modules in (_modules(model, cut) for cut in ranges):
        for units in _runs(modules):
            for module in units[0]:
                for name in abstract_params(module):
                    held[f"{module.path}.{name}"] = len(runs), f"{module.name}.{name}"
            runs.append(Run(unit=_kind(units[0]), num_units=len(units)))
    used = sorted({path for m in _modules(model, layers) for _, path in m.tied})
    params = tied_params(model)
    return StageRuns(
        runs=tuple(runs),
        tied=tuple((path, held.get(path, (len(runs), path))) for path in used),
        borrowed=tuple((path, params[path]) for path in used if path not in held),
        first=layers[0] == 0,
        last=layers[1] == len(model.layers),
    )


def gradient_sizes(model: Model, layers: LayerRange) -> list[int]:
    """Elements of each array that is summed as one for a segment.

    These are its runs' stacked parameters without tied ones, which have sums of their
    own.
    """
    tied = tied_params(model)
    return [
        len(units) * math.prod(param.shape)
        for units in _runs(_modules(model, layers))
        for module in units[0]
        for name, param in abstract_params(module).items()
        if f"{module.path}.{name}" not in tied
    ]


def _modules(model: Model, layers: LayerRange) -> Unit:
    return tuple(m for layer in model.layers[slice(*layers)] for m in layer.modules)


def _kind(unit: Unit) -> Unit:
    return tuple(replace(module, path=module.name) for module in unit)


def tied_params(model: Model) -> dict[str, AbstractParam]:
    """Find the model's tied parameters by full path."""
    used = sorted({path for m in model.modules for _, path in m.tied})
    owners = {module.path: module for module in model.modules}
    found = {}
    for path in used:
        owner, _, name = path.rpartition(".")
        found[path] = abstract_params(owners[owner])[name]
    return found


def tied_holders(plan: Plan, model: Model) -> dict[str, tuple[StageKey, ...]]:
    """Find the stages whose modules own or use each tied parameter, by full path."""
    holders: dict[str, list[StageKey]] = {path: [] for path in tied_params(model)}
    for r, s, stage in plan.stages():
        modules = _modules(model, stage.layers)
        owners = {module.path for module in modules}
        used = {path for module in modules for _, path in module.tied}
        for path, found in holders.items():
            if path in used or path.rpartition(".")[0] in owners:
                found.append((r, s))
    return {path: tuple(found) for path, found in holders.items()}


def _runs(modules: Unit) -> list[list[Unit]]:
    """Units = modules of one block; equal consecutive units make one run."""
    units = [tuple(of_block) for _, of_block in groupby(modules, lambda m: m.block)]
    return [list(equal) for _, equal in groupby(units, _kind)]
