# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory figures that compilers report for stages: workspaces, by program.

Owns the keys, made of all that decides a stage's programs; the look-up of the temporary
bytes of the programs that a schedule runs; and the JSON in which a run stores them.
Does not own the model for programs that were never compiled (`costs/workspace.py`) nor
the compilation (`hetjax/runtime/`).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import jax

from hetjax.cluster.catalogue import Precision, canonical_name
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed, read_file
from hetjax.files.tables import read_record
from hetjax.files.writing import write_whole
from hetjax.mesh.axes import abstract_mesh
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Stage, StageKey, segments, segments_of
from hetjax.stage.arrays import OptimizerInit, master_weights, optimizer_state
from hetjax.stage.partition import BlockStack, PlanPartition, stage_stacks

VERSION = 1
_PASSES = ("F", "B", "FB", "I", "W")
# the largest update of the stage's stacks; the largest packing of a gradient group,
# including its rows
_UPDATES = ("UPDATE", "PACK")
# Bytes of each program on a device, by the key of a stage's passes or of its updates.
CompiledBytes = Mapping[str, Mapping[str, int]]
NOTHING: CompiledBytes = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStage:
    """A compiler's figures for a stage, None if unknown: temporary bytes of its largest
    pass, of its update, and of packing gradients, including the packed rows."""

    workspace_bytes: int | None = None
    update_bytes: int | None = None
    packing_bytes: int | None = None


NOT_COMPILED = CompiledStage()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrograms:
    """All that decides the programs of a plan's stages, and the keys of the programs.

    Keys are equal if everything that decides the programs is. The plan sets every
    stage's attention. `precisions` has the known precisions, `devices` the device kinds
    of all stages.
    """

    plan: Plan
    model: Model
    precisions: Mapping[StageKey, Precision]
    devices: Mapping[StageKey, str]
    optimizer: OptimizerInit

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        model: Model,
        devices: Mapping[StageKey, str],
        optimizer: OptimizerInit,
    ) -> "PlanPrograms":
        """Return the programs of a plan that sets every stage's precision, too."""
        stages = _stages(plan).items()
        return cls(
            plan=plan,
            model=model,
            precisions={k: stage.precision for k, stage in stages if stage.precision},
            devices=devices,
            optimizer=optimizer,
        )

    def passes(self, key: StageKey) -> str:
        """Return the key of the programs of a stage's passes."""
        r, s = key
        replica = self.plan.replicas[r]
        stage = replica.stages[s]
        own = self.precisions[key]
        decides = (
            stage_stacks(self.model, segments_of(stage, segments(self.plan))),
            stage.mesh,
            stage.remat,
            stage.attention,
            (replica.microbatch_size, self.plan.seq_len, self.plan.packed),
            [self.precisions.get((r, at), own) for at in (s, s - 1, s + 1)],
            "float16" in self.precisions.values(),  # the loss is then scaled
            canonical_name(self.devices[key]),
            jax.__version__,
        )
        return hashlib.sha256(repr(decides).encode()).hexdigest()

    def updates(self, key: StageKey) -> str:
        """Return the key of the programs that sum gradients and update weights.

        Keys are equal if the stage's arrays, including its optimizer state, are equal,
        and so are all stages that hold some of its gradients.
        """
        partition, stages = _partition(self.plan, self.model), _stages(self.plan)
        stacks = tuple(named.stack for named in partition.stages[key].stacks)
        mesh = stages[key].mesh
        holders = {
            group: [
                (stages[at].mesh, stages[at].offload, canonical_name(self.devices[at]))
                for at in partition.holders[group]
            ]
            for group in partition.stages[key].groups
        }
        decides = (
            (stacks, mesh, stages[key].offload, self.precisions[key]),
            partition.stages[key].groups,
            holders,
            _state_layout(stacks, mesh.data, mesh.tensor, self.optimizer),
            canonical_name(self.devices[key]),
            jax.__version__,
        )
        return hashlib.sha256(repr(decides).encode()).hexdigest()


_partition = lru_cache(maxsize=64)(PlanPartition)


def _stages(plan: Plan) -> dict[StageKey, Stage]:
    return {(r, s): stage for r, s, stage in plan.stages()}


@lru_cache(maxsize=256)
def _state_layout(
    stacks: tuple[BlockStack, ...], data: int, tensor: int, optimizer: OptimizerInit
) -> str:
    masters = master_weights(stacks, abstract_mesh(data=data, tensor=tensor))
    return repr(optimizer_state(stacks, masters, optimizer))


def compiled_stage(
    compiled: CompiledBytes, programs: PlanPrograms, key: StageKey, *, split: bool
) -> CompiledStage:
    """Return the compiler's figures for a stage's programs."""
    if not compiled:
        return NOT_COMPILED
    last = key[1] + 1 == len(programs.plan.replicas[key[0]].stages)
    update = compiled.get(programs.updates(key), {})
    passes = programs.passes(key)
    return CompiledStage(
        workspace_bytes=workspace_of(compiled, passes, last=last, split=split),
        update_bytes=update.get("UPDATE"),
        packing_bytes=update.get("PACK"),
    )


def workspace_of(
    compiled: CompiledBytes, program: str, *, last: bool, split: bool
) -> int | None:
    """Return the temporary bytes of the largest pass that may run; None if not all of
    them were compiled."""
    found = compiled.get(program, {})
    needed = ("F", "I", "W") if split else ("FB",) if last else ("F", "B")
    if not found.keys() >= {*needed}:
        return None
    return max(found.values() if split else (found[name] for name in needed))


def by_program(
    programs: PlanPrograms, stages: Mapping[StageKey, Mapping[str, int]]
) -> CompiledBytes:
    """Return the figures of `stages`, keyed by their programs."""
    found = NOTHING
    for key, sizes in stages.items():
        own = {
            programs.passes(key): {n: sizes[n] for n in sizes if n not in _UPDATES},
            programs.updates(key): {n: sizes[n] for n in sizes if n in _UPDATES},
        }
        found = merged(found, own)
    return found


def merged(compiled: CompiledBytes, found: CompiledBytes) -> CompiledBytes:
    """Return both; for the same pass, `found` takes precedence."""
    return {
        program: {**compiled.get(program, {}), **found.get(program, {})}
        for program in [*compiled, *(new for new in found if new not in compiled)]
    }


def read_compiled(path: str | Path) -> CompiledBytes:
    """Read the file that a run has written; a BadInput error starts with the path."""
    return read_file(path, parse_compiled, what="file of compiled programs")


def parse_compiled(text: str) -> CompiledBytes:
    """Read the JSON text; BadInput says where the error is."""
    fix = "remove the file: the next start writes a new one"
    allowed = "JSON: one object with version and programs"
    raw = parsed(text, json_value, what="JSON", allowed=allowed, fix=fix)
    values = read_record(
        raw, where="", required={"version": "an integer", "programs": "a table"}
    )
    if values["version"] != VERSION:
        raise BadInput(
            got=f"version {values['version']}", allowed=f"{VERSION}", fix=fix
        )
    return {
        program: read_record(
            passes,
            where=f"programs.{program}",
            required={},
            optional=dict.fromkeys((*_PASSES, *_UPDATES), "an integer"),
        )
        for program, passes in values["programs"].items()
    }


def write_compiled(path: str | Path, compiled: CompiledBytes) -> None:
    """Write a file that `read_compiled` reads back as the same."""
    values = {"version": VERSION, "programs": {k: {**v} for k, v in compiled.items()}}
    write_whole(path, json.dumps(values, indent=1) + "\n")
