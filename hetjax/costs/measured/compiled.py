# SPDX-License-Identifier: Apache-2.0
"""What compilers say of the memory of stages: measured workspaces, by program.

Owns what decides a stage's programs, as a key; the look-up of the temporary bytes of
those that a schedule runs; and the JSON that a run keeps them in. Does not own the
model of what was never compiled (`costs/workspace.py`) nor who compiles
(`hetjax/runtime/`).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax

from hetjax.cluster.catalogue import Precision, canonical_name
from hetjax.cluster.user_files import parsed, read_file, read_record, write_whole
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, StageKey, segments, segments_of
from hetjax.stage.partition import stage_stacks

VERSION = 1
_PASSES = ("F", "B", "FB", "I", "W")
# Temporary bytes of each pass on a device, by the stage's key.
CompiledBytes = Mapping[str, Mapping[str, int]]
NOTHING: CompiledBytes = MappingProxyType({})


def stage_program(
    plan: Plan,
    model: Model,
    key: StageKey,
    precisions: Mapping[StageKey, Precision],
    device: str,
) -> str:
    """Return the key of a stage's programs: equal if all that decides them is.

    The plan says every stage's attention; `device` is the kind that they run on.
    """
    r, s = key
    replica = plan.replicas[r]
    stage = replica.stages[s]
    decides = (
        stage_stacks(model, segments_of(stage, segments(plan))),
        stage.mesh,
        stage.remat,
        stage.attention,
        (replica.microbatch_size, plan.seq_len, plan.packed),
        [precisions.get((r, at), precisions[key]) for at in (s, s - 1, s + 1)],
        "float16" in precisions.values(),  # the loss is then scaled
        canonical_name(device),
        jax.__version__,
    )
    return hashlib.sha256(repr(decides).encode()).hexdigest()


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


def merged(compiled: CompiledBytes, found: CompiledBytes) -> CompiledBytes:
    """Return both, of the same pass what was found."""
    return {
        program: {**compiled.get(program, {}), **found.get(program, {})}
        for program in [*compiled, *(new for new in found if new not in compiled)]
    }


def read_compiled(path: str | Path) -> CompiledBytes:
    """Read what a run has kept; BadInput starts with the path."""
    return read_file(path, parse_compiled, what="file of compiled programs")


def parse_compiled(text: str) -> CompiledBytes:
    """Read the JSON text; BadInput says where and what."""
    fix = "remove the file: the next start writes it anew"
    allowed = "JSON: one object with version and programs"
    raw = parsed(text, json.loads, what="JSON", allowed=allowed, fix=fix)
    values = read_record(
        raw, where="", required={"version": "an integer", "programs": "a table"}
    )
    return {
        program: read_record(
            passes,
            where=f"programs.{program}",
            required={},
            optional=dict.fromkeys(_PASSES, "an integer"),
        )
        for program, passes in values["programs"].items()
    }


def write_compiled(path: str | Path, compiled: CompiledBytes) -> None:
    """Write what reads back as the same."""
    values = {"version": VERSION, "programs": {k: {**v} for k, v in compiled.items()}}
    write_whole(path, json.dumps(values, indent=1) + "\n")
