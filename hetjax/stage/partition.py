# SPDX-License-Identifier: Apache-2.0
"""Partitions a model by a plan: block stacks, gradient groups, holders.

A unit is the adjacent modules of one block; equal consecutive units of a segment make
one stack, which a stage scans. Owns the stacks of a stage without paths, so that equal
stages have equal stacks, and with paths: the names of their parameters, their gradient
groups, who holds a group, and who saves what. Does not own arrays (`arrays.py`) nor
computation with them (`function.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from hetjax.models.head import validating
from hetjax.models.model import AbstractParam, Model, ModuleSpec, abstract_params
from hetjax.plans.plan import (
    Group,
    LayerRange,
    Plan,
    StageKey,
    segments,
    segments_of,
)

LeafId = tuple[int, str]  # (index of the stack within the stage, leaf within the stack)
Unit = tuple[ModuleSpec, ...]


@dataclass(frozen=True, slots=True)
class BlockStack:
    """`num_units` equal units of one segment; stacked on dim 0 if there are several.

    The unit's modules have their names as paths. A leaf is named `module.parameter`. A
    stack that holds a tied parameter for another stage has `only` set to that leaf, and
    is never called.
    """

    unit: Unit
    num_units: int = 1
    only: str | None = None

    @property
    def stacked(self) -> bool:
        return self.num_units > 1

    def leaves(self) -> dict[str, AbstractParam]:
        """Return shape and logical axes of one unit's parameters by leaf name."""
        named = {
            f"{module.name}.{name}": param
            for module in self.unit
            for name, param in abstract_params(module).items()
        }
        return named if self.only is None else {self.only: named[self.only]}

    def shape(self, param: AbstractParam) -> tuple[int, ...]:
        """Return the shape of a parameter of all units: units first, if several."""
        return (self.num_units, *param.shape) if self.stacked else param.shape

    def trained(self) -> dict[str, AbstractParam]:
        """Return the trained ones of `leaves`."""
        return {leaf: param for leaf, param in self.leaves().items() if param.trained}

    @property
    def unit_size(self) -> int:
        """The number of trained parameters of a unit."""
        return sum(math.prod(param.shape) for param in self.trained().values())


@dataclass(frozen=True, slots=True)
class NamedStack:
    """A block stack with the paths of its modules, unit by unit."""

    stack: BlockStack
    paths: tuple[tuple[str, ...], ...]

    def path(self, leaf: str, unit: int) -> str:
        """Return the full path of a leaf's parameter in a unit: its checkpoint key."""
        module_name, _, parameter = leaf.partition(".")
        names = [module.name for module in self.stack.unit]
        return f"{self.paths[unit][names.index(module_name)]}.{parameter}"

    def name_of(self, unit: int) -> str:
        """Return the name that identifies a unit, in any stage that holds it."""
        return self.paths[unit][0]

    def modules(self) -> Iterator[ModuleSpec]:
        """Yield the modules of all units, with their paths."""
        for paths in self.paths:
            for module, path in zip(self.stack.unit, paths, strict=True):
                yield replace(module, path=path)


@dataclass(frozen=True, slots=True)
class StageStacks:
    """All that decides a stage's mathematics.

    `stacks` are in layer order; those of borrowed tied parameters come last. `tied`
    says where the stage holds each tied parameter (full path -> leaf).
    """

    stacks: tuple[BlockStack, ...]
    tied: tuple[tuple[str, LeafId], ...] = ()
    first: bool = False
    last: bool = False

    def validated(self) -> "StageStacks":
        """Return the same stacks with a head that gives only cross-entropy."""
        units = (tuple(map(validating, stack.unit)) for stack in self.stacks)
        pairs = zip(self.stacks, units, strict=True)
        return replace(self, stacks=tuple(replace(s, unit=unit) for s, unit in pairs))


@dataclass(frozen=True, slots=True)
class StageParameters:
    """All parameters that a stage holds, and the groups in which it sums gradients.

    `kind` is all that its programs depend on. Frozen parameters have no gradients.
    """

    stacks: tuple[NamedStack, ...]
    kind: StageStacks
    groups: dict[Group, tuple[LeafId, ...]]  # segments, highest first; then tied


@dataclass(frozen=True)
class PlanPartition:
    """The parameters of all stages and the holders of all gradient groups."""

    plan: Plan
    model: Model

    @cached_property
    def stages(self) -> dict[StageKey, StageParameters]:
        cuts = segments(self.plan)
        return {
            (r, s): stage_parameters(self.model, segments_of(stage, cuts))
            for r, s, stage in self.plan.stages()
        }

    @cached_property
    def tied(self) -> dict[str, tuple[StageKey, ...]]:
        """Full path of each trained tied parameter -> the stages that hold it."""
        return tied_holders(self.plan, self.model)

    @cached_property
    def holders(self) -> dict[Group, tuple[StageKey, ...]]:
        """Gradient group -> the stages that hold it, in replica order."""
        found: dict[Group, list[StageKey]] = {}
        for stage_id, held in self.stages.items():
            for group in held.groups:
                found.setdefault(group, []).append(stage_id)
        return {group: tuple(ids) for group, ids in found.items()}

    @cached_property
    def savers(self) -> dict[str, StageKey]:
        """Name of each unit that has state -> the stage that saves it.

        Nodes share the load: the largest units go first, each to the node that has
        least to save so far.
        """
        holders: dict[str, list[StageKey]] = {}
        sizes: dict[str, int] = {}
        for stage_id, held in self.stages.items():
            for named in (n for n in held.stacks if _has_state(n.stack)):
                for unit in range(named.stack.num_units):
                    holders.setdefault(named.name_of(unit), []).append(stage_id)
                    sizes[named.name_of(unit)] = named.stack.unit_size
        nodes = {(r, s): stage.node for r, s, stage in self.plan.stages()}
        load = dict.fromkeys(nodes.values(), 0)
        found = {}
        for name in sorted(holders, key=lambda name: (-sizes[name], name)):
            saver = min(holders[name], key=lambda stage_id: load[nodes[stage_id]])
            load[nodes[saver]] += sizes[name]
            found[name] = saver
        return found


def _has_state(stack: BlockStack) -> bool:
    """Return whether its units have state that is not saved through another stack."""
    return stack.only is None and stack.unit_size > 0


def stage_parameters(model: Model, ranges: Sequence[LayerRange]) -> StageParameters:
    """Return the parameters of a stage that holds these adjacent segments."""
    layers = (ranges[0][0], ranges[-1][1])
    tied = _tied_in(model, layers)
    stacks: list[NamedStack] = []
    groups: dict[Group, tuple[LeafId, ...]] = {}
    places: dict[str, LeafId] = {}
    for segment in ranges:
        fresh = _named_stacks(_modules(model, segment))
        ids = _leaf_ids(fresh, first=len(stacks))
        places |= {path: leaf for leaf, path in ids.items() if path in tied}
        stacks += fresh
        own = _trained(fresh, ids, first=len(stacks) - len(fresh))
        if own := tuple(leaf for leaf in own if ids[leaf] not in tied):
            groups[segment] = own
    for path, owner in tied.items():
        if path not in places:
            only = owner.name + path.removeprefix(owner.path)
            places[path] = len(stacks), only
            borrowed = BlockStack((_kind(owner),), only=only)
            stacks.append(NamedStack(borrowed, ((owner.path,),)))
    places = {path: places[path] for path in tied}
    groups = dict(reversed(groups.items())) | {
        path: (places[path],) for path, owner in tied.items() if _trains(owner, path)
    }
    kind = StageStacks(
        stacks=tuple(named.stack for named in stacks),
        tied=tuple(places.items()),
        first=layers[0] == 0,
        last=layers[1] == len(model.layers),
    )
    return StageParameters(tuple(stacks), kind, groups)


def parameter_alone(module: ModuleSpec, name: str) -> StageParameters:
    """Return one parameter of a module, as if a stage held nothing else."""
    stack = BlockStack((_kind(module),), only=f"{module.name}.{name}")
    named = NamedStack(stack, ((module.path,),))
    return StageParameters((named,), StageStacks((stack,)), {})


def stage_stacks(model: Model, ranges: Sequence[LayerRange]) -> StageStacks:
    """Return the stage's stacks without paths: equal stages have equal stacks."""
    return stage_parameters(model, ranges).kind


def gradient_sizes(model: Model, group: Group) -> list[int]:
    """Return the number of elements of each array that a gradient group sums as one.

    For a segment these are its stacked parameters without tied ones, which have
    separate sums.
    """
    segment = (0, len(model.layers)) if isinstance(group, str) else group
    held = stage_parameters(model, [segment])
    stacks = held.kind.stacks
    return [
        stacks[at].num_units * math.prod(stacks[at].leaves()[leaf].shape)
        for at, leaf in held.groups.get(group, ())
    ]


def tied_holders(plan: Plan, model: Model) -> dict[str, tuple[StageKey, ...]]:
    """Return the stages that own or use each trained tied parameter, by full path."""
    held = {(r, s): _tied_in(model, stage.layers) for r, s, stage in plan.stages()}
    return {
        path: tuple(key for key, paths in held.items() if path in paths)
        for path, owner in _tied_in(model, (0, len(model.layers))).items()
        if _trains(owner, path)
    }


def _trains(owner: ModuleSpec, path: str) -> bool:
    return abstract_params(owner)[path.removeprefix(f"{owner.path}.")].trained


def _tied_in(model: Model, layers: LayerRange) -> dict[str, ModuleSpec]:
    """Return tied parameters that modules of the layers own or use -> owning module."""
    modules = set(_modules(model, layers))
    owners = {
        path: next(m for m in model.modules if path.startswith(m.path + "."))
        for path in sorted({path for m in model.modules for _, path in m.tied})
    }
    return {
        path: owner
        for path, owner in owners.items()
        if owner in modules or any(path in dict(m.tied).values() for m in modules)
    }


def _modules(model: Model, layers: LayerRange) -> Unit:
    return tuple(m for layer in model.layers[slice(*layers)] for m in layer.modules)


def _named_stacks(modules: Unit) -> list[NamedStack]:
    units = [tuple(of_block) for _, of_block in groupby(modules, lambda m: m.block)]
    stacks = []
    for kind, equal in groupby(units, lambda unit: tuple(map(_kind, unit))):
        paths = tuple(tuple(module.path for module in unit) for unit in equal)
        stacks.append(NamedStack(BlockStack(kind, len(paths)), paths))
    return stacks


def _kind(module: ModuleSpec) -> ModuleSpec:
    return replace(module, path=module.name)


def _trained(
    stacks: Sequence[NamedStack], ids: dict[LeafId, str], first: int
) -> tuple[LeafId, ...]:
    """Return the trained ones of the leaves."""
    trained = [named.stack.trained() for named in stacks]
    return tuple((at, leaf) for at, leaf in ids if leaf in trained[at - first])


def _leaf_ids(stacks: Sequence[NamedStack], first: int) -> dict[LeafId, str]:
    """Return the leaves with the paths that they have in the first unit."""
    return {
        (index, leaf): named.path(leaf, 0)
        for index, named in enumerate(stacks, start=first)
        for leaf in named.stack.leaves()
    }
