# SPDX-License-Identifier: Apache-2.0
"""Compares our figures with the compilers', and fits margins that leave out one kind.

Owns the total, the fit, and the report. Does not own the model, which is the product's
own and is evaluated anew for every row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from experiments.compile.stages import OPTIMIZER
from experiments.compile.targets import compiler_of
from experiments.compiled_memory.cells import (
    HOST,
    MemoryCell,
    backend_of,
    model_and_plan,
)
from hetjax.costs.graph.passes import passes, split_passes
from hetjax.costs.stage_memory import stage_memory, stage_shares
from hetjax.costs.workspace import MARGINS, pass_bytes
from hetjax.plans.plan import segments, segments_of
from hetjax.stage.partition import stage_stacks

LEAST, MOST = -0.02, 0.10  # of a total
Rows = Mapping[MemoryCell, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A cell's bytes. `buffer_bytes` lives through the step and in flight, and is known
    to the byte. The others are each pass's workspace, by our model without margin and
    by the compiler.
    """

    cell: MemoryCell
    buffer_bytes: int
    predicted_bytes: dict[str, int]
    compiled_bytes: dict[str, int]

    def error(self, margin: float) -> float:
        """Return our total over the compiler's, less one."""
        ours = margin * max(self.predicted_bytes.values())
        compiled = max(self.compiled_bytes.values())
        return (ours - compiled) / (self.buffer_bytes + compiled)


def compared(cell: MemoryCell, row: Mapping[str, Any]) -> Compared:
    """Evaluate the model for a row's stage."""
    model, plan, key = model_and_plan(cell)
    replica = plan.replicas[key[0]]
    stage = replica.stages[key[1]]
    held = stage_stacks(model, segments_of(stage, segments(plan)))
    shares = stage_shares(plan, model, replica, stage, cell.dtype)
    trace = split_passes if cell.split else passes
    traced = trace(held, shares, stage.remat)
    return Compared(
        cell=cell,
        buffer_bytes=_buffer_bytes(cell) + row["padding_bytes"],
        predicted_bytes=pass_bytes(traced, cell.mesh[1], compiler_of(cell.target)),
        compiled_bytes=row["temp_bytes"],
    )


def _buffer_bytes(cell: MemoryCell) -> int:
    model, plan, key = model_and_plan(cell)
    memory = stage_memory(
        plan,
        model,
        key,
        dtype=cell.dtype,
        optimizer=OPTIMIZER.init,
        halves=cell.split,
        split=cell.split,
        compiler=compiler_of(cell.target),
    )
    fused = cell.place == "last" and not cell.split
    held = memory.input_bytes if fused else memory.saved_bytes
    passing = memory.input_bytes + 2 * memory.output_bytes
    half = memory.half_saved_bytes if cell.split else 0
    return memory.static_bytes + cell.in_flight * held + passing + half


def fitted_margin(found: Sequence[Compared]) -> float:
    """Return the least margin with no total below -2 % and, of those, the most totals
    within 0 and +10 %. If all margins fail, return the one with the most within."""

    def quality(margin: float) -> tuple[bool, int, float]:
        errors = [one.error(margin) for one in found]
        return min(errors) >= LEAST, sum(map(_is_within, errors)), -margin

    return max((percent / 100 for percent in range(100, 131)), key=quality)


def report(files: Mapping[str, Rows]) -> dict[str, Any]:
    """Judge the rows of every backend that has some, of files by name.

    Rows of programs that compile only with other kernels than the compiler's first
    guess (`experiments/compile/kernels.py`) are judged separately, and with the rest.
    """
    rows = [(name, *row) for name, file in files.items() for row in file.items()]
    found = [
        (name, compared(cell, row), bool(row.get("other_choices")))
        for name, cell, row in rows
        if not row["failures"]
    ]
    judged: dict[str, Any] = {}
    for backend in ("cpu", "gpu", "tpu"):
        own = [one for one in found if backend_of(one[1].cell.target) == backend]
        if own:
            judged[backend] = _judged([one[:2] for one in own if not one[2]])
            judged[backend] |= _with_others(own)
    refused = sum(bool(row["failures"]) for _, _, row in rows)
    return {
        "limits": [0, MOST],
        "never_under": LEAST,
        "refused_by_compilers": refused,
        "backends": judged,
    }


def _with_others(own: Sequence[tuple[str, Compared, bool]]) -> dict[str, Any]:
    others = [one for _, one, has_others in own if has_others]
    if not others:
        return {}
    margin = MARGINS[backend_of(others[0].cell.target)]
    every = _judged([one[:2] for one in own])
    return {
        "other_kernels": {"margin": margin}
        | _summary([one.error(margin) for one in others]),
        "with_other_kernels": {
            name: every[name] for name in ("in_use", "each_left_out")
        },
    }


def _judged(named: Sequence[tuple[str, Compared]]) -> dict[str, Any]:
    """Return the fitted margin and the errors under it, of all cells and by form of
    attention. Also return the errors of each kind under the margin of all others, and
    of each file under the margin in use."""
    found = [one for _, one in named]
    margin = fitted_margin(found)
    in_use = MARGINS[backend_of(found[0].cell.target)]
    kinds = dict.fromkeys(_kind(one.cell) for one in found)
    left_out, errors = {}, []
    for kind in kinds:
        own = [one for one in found if _kind(one.cell) == kind]
        others = [one for one in found if _kind(one.cell) != kind]
        theirs = fitted_margin(others or own)
        left_out[kind] = {"margin": theirs} | _summary([o.error(theirs) for o in own])
        errors += [one.error(theirs) for one in own]
    forms = dict.fromkeys(one.cell.attention for one in found)
    files = dict.fromkeys(name for name, _ in named)
    return {
        "margin": margin,
        "all": _summary([one.error(margin) for one in found]),
        "in_use": {"margin": in_use} | _summary([one.error(in_use) for one in found]),
        "each_left_out": _summary(errors),
        "left_out": left_out,
        "attention": {
            form: _summary([o.error(margin) for o in found if o.cell.attention == form])
            for form in forms
        },
        "files": {
            name: _summary([one.error(in_use) for file, one in named if file == name])
            for name in files
        },
    }


def _kind(cell: MemoryCell) -> str:
    """Return the group that is left out: the kind of device, or on CPUs the model."""
    return cell.model if cell.target == HOST else cell.target


def _summary(errors: Sequence[float]) -> dict[str, float]:
    return {
        "cells": len(errors),
        "within": sum(map(_is_within, errors)) / len(errors),
        "least": min(errors),
        "median": median(errors),
        "greatest": max(errors),
    }


def _is_within(error: float) -> bool:
    return 0 <= error <= MOST


def markdown(judged: Mapping[str, Any]) -> str:
    """Return the report as a table, kinds under the margin of all others."""
    lines = []
    for backend, own in judged["backends"].items():
        for kind, one in own["left_out"].items():
            lines.append(_line(kind, one["margin"], one))
        lines.append(_line(f"**{backend}, each left out**", None, own["each_left_out"]))
        for form, one in own["attention"].items():
            lines.append(_line(f"{backend}, {form}", own["margin"], one))
        lines.append(_line(f"{backend}, all", own["margin"], own["all"]))
        used = own["in_use"]
        for name, one in own["files"].items():
            lines.append(_line(f"{backend}, `{name}`", used["margin"], one))
        lines.append(_line(f"**{backend}, in use**", used["margin"], used))
        if others := own.get("other_kernels"):
            lines.append(_line(f"{backend}, other kernels", others["margin"], others))
            every = own["with_other_kernels"]
            name = f"{backend}, in use, with these"
            lines.append(_line(name, used["margin"], every["in_use"]))
            name = f"{backend}, each left out, with these"
            lines.append(_line(name, None, every["each_left_out"]))
    head = "|  | margin | stages | within 0 and +10 % | least | median | greatest |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *lines])


def _line(name: str, margin: float | None, one: Mapping[str, float]) -> str:
    told = "" if margin is None else f"{margin:.2f}"
    errors = (f"{100 * one[k]:+.1f} %" for k in ("least", "median", "greatest"))
    cells = f"{one['cells']} | {100 * one['within']:.0f} %"
    return f"| {name} | {told} | {cells} | {' | '.join(errors)} |"
