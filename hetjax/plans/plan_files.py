# SPDX-License-Identifier: Apache-2.0
"""Converts plan files: JSON to `Plan` and back.

Owns the keys of the file, their types, and which keys a hand-written plan may leave
out. Does not own the rules between their values (`validation.py`).
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed, read_file
from hetjax.files.tables import Kind, as_kind, join, read_fields, read_list, read_record
from hetjax.files.writing import write_whole
from hetjax.names import RULE, is_node
from hetjax.plans.plan import Plan, Prediction, Replica, Stage, StageMesh
from hetjax.plans.schedules import default_launch_ahead

VERSION = 1
_CHOICES = {"precision": None, "attention": None, "offload": "none"}
_STAGE_DEPTH = 4  # replicas, a replica, its stages, a stage

_PLAN: dict[str, Kind] = {
    "version": "an integer",
    "model": "a string",
    "seq_len": "an integer",
    "global_batch": "an integer",
    "schedule": "a string",
    "replicas": "a list",
}


def read_plan(path: str | Path) -> Plan:
    """Read a plan file. The message of a BadInput starts with the path."""
    return read_file(path, parse_plan, what="plan file")


def parse_plan(text: str) -> Plan:
    """Parse the JSON text of a plan. A BadInput says where the error is."""
    raw = _json(text)
    version = raw.get("version", VERSION) if isinstance(raw, dict) else VERSION
    if version != VERSION or isinstance(version, bool):
        raise BadInput(
            got=f"version = {version!r}",
            allowed=f"version {VERSION}",
            fix=f'write "version": {VERSION}, or use the hetjax version that wrote it',
        )
    values = read_record(
        raw,
        where="",
        required=_PLAN,
        optional={
            "fingerprint": "a string",
            "packed": "true or false",
            "programs": "a table",
            "predicted": "a table",
        },
    )
    for node in values.get("programs", {}):
        _check_node(node, "programs for node")
    del values["version"]
    values["replicas"] = tuple(
        _replica(raw, f"replicas[{r}]", values["schedule"])
        for r, raw in enumerate(values["replicas"])
    )
    values["programs"] = _table_of(values.get("programs", {}), "a string", "programs")
    if "predicted" in values:
        values["predicted"] = _predicted(values["predicted"])
    return Plan(**values)


def plan_json(plan: Plan) -> str:
    """Return JSON text that `parse_plan` reads back as the same plan."""
    values: dict[str, Any] = {
        "version": VERSION,
        "model": plan.model,
        **({} if plan.fingerprint is None else {"fingerprint": plan.fingerprint}),
        "seq_len": plan.seq_len,
        "global_batch": plan.global_batch,
        "schedule": plan.schedule,
        "replicas": [_said(replica) for replica in plan.replicas],
    }
    if plan.packed:
        values["packed"] = True
    if plan.programs:
        values["programs"] = dict(plan.programs)
    if plan.predicted is not None:
        predicted = asdict(plan.predicted)
        values["predicted"] = {
            k: v for k, v in predicted.items() if v not in (None, {})
        }
    return "\n".join(_lines(values, depth=0)) + "\n"


def _said(replica: Replica) -> dict[str, Any]:
    """Return the replica's fields, without the `_CHOICES` that a stage does not set."""
    values = asdict(replica)
    for stage in values["stages"]:
        for name, unsaid in _CHOICES.items():
            if stage[name] == unsaid:
                del stage[name]
    return values


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write the plan file atomically."""
    write_whole(path, plan_json(plan))


def _json(text: str) -> Any:
    return parsed(
        text,
        partial(json_value, finite=False),
        what="JSON",
        allowed="JSON: one object with version, model, replicas, ...",
        fix="correct the file there",
    )


def _replica(raw: object, where: str, schedule: str) -> Replica:
    values = read_fields(raw, Replica, where=where)
    stages = values["stages"]
    return Replica(
        num_microbatches=values["num_microbatches"],
        microbatch_size=values["microbatch_size"],
        stages=tuple(
            _stage(
                raw,
                f"{where}.stages[{s}]",
                schedule,
                default_launch_ahead(
                    schedule,
                    num_stages=len(stages),
                    stage=s,
                    num_microbatches=values["num_microbatches"],
                ),
            )
            for s, raw in enumerate(stages)
        ),
    )


def _stage(raw: object, where: str, schedule: str, launch_ahead: int) -> Stage:
    values = read_fields(raw, Stage, where=where, optional=["launch_ahead"])
    if schedule == "h1f1b" and "launch_ahead" not in values:
        raise BadInput(
            got=f"{where} without launch_ahead, but schedule 'h1f1b' needs it",
            allowed="launch_ahead in every stage: h1f1b is 1f1b with other values",
            fix="add launch_ahead, or fit it to links and stages: python -m "
            "hetjax.simulate PLAN --schedule h1f1b --output FITTED.json",
        )
    _check_node(values["node"], join(where, "node"))
    layers = read_list(values["layers"], "an integer", where=join(where, "layers"))
    if len(layers) != 2:
        raise BadInput(
            got=f"{where}.layers = {list(layers)}",
            allowed="two integers: the first layer and the one after the last",
            fix=f"write {where}.layers as [0, 13]",
        )
    sizes = read_fields(values.get("mesh", {}), StageMesh, where=join(where, "mesh"))
    return Stage(
        node=values["node"],
        devices=read_list(
            values["devices"], "an integer", where=join(where, "devices")
        ),
        mesh=StageMesh(**sizes),
        layers=(layers[0], layers[1]),
        remat=values.get("remat", "none"),
        launch_ahead=values.get("launch_ahead", launch_ahead),
        precision=values.get("precision"),
        attention=values.get("attention"),
        offload=values.get("offload", "none"),
    )


def _check_node(name: str, where: str) -> None:
    if not is_node(name):
        raise BadInput(
            got=f"{where} = {name[:80]!r}",
            allowed=f"the name of a node: {RULE}",
            fix="write the name of a node of the cluster",
        )


def _predicted(raw: object) -> Prediction:
    values = read_fields(raw, Prediction, where="predicted")
    peaks = values.pop("peak_memory_bytes", {})
    where = "predicted.peak_memory_bytes"
    return Prediction(**values, peak_memory_bytes=_table_of(peaks, "an integer", where))


def _table_of(table: dict[str, object], kind: Kind, where: str) -> dict[str, Any]:
    return {
        key: as_kind(value, kind, where=join(where, key))
        for key, value in table.items()
    }


def _lines(value: Any, depth: int) -> list[str]:
    """Return JSON lines: one line per value at a stage's depth, else one per entry."""
    nested = isinstance(value, (dict, list, tuple))
    if not nested or not value or depth == _STAGE_DEPTH:
        return [json.dumps(value, allow_nan=False)]
    if isinstance(value, dict):
        entries = [(f"{json.dumps(key)}: ", entry) for key, entry in value.items()]
        opening, closing = "{", "}"
    else:
        entries = [("", entry) for entry in value]
        opening, closing = "[", "]"
    lines = [opening]
    for number, (prefix, entry) in enumerate(entries, start=1):
        first, *rest = _lines(entry, depth + 1)
        block = [prefix + first, *rest]
        block[-1] += "," if number < len(entries) else ""
        lines += [f"  {line}" for line in block]
    return [*lines, closing]
