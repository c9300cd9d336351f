# SPDX-License-Identifier: Apache-2.0
"""A plan as plain text for people.

Owns the columns. Does not own what machines read (`files.py`) nor any terminal.
"""

from collections.abc import Sequence

from hetjax.plans.plan import Plan, Replica, Stage

_HEADER = (
    "replica",
    "stage",
    "node",
    "devices",
    "data x tensor",
    "layers",
    "remat",
    "launch-ahead",
    "microbatches",
)


def plan_table(plan: Plan) -> str:
    """Return a line on the whole plan, then one aligned row per stage."""
    stages = [_row(r, s, plan.replicas[r], stage) for r, s, stage in plan.stages()]
    return "\n".join([_title(plan), *aligned(_HEADER, stages)]) + "\n"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, every column as wide as its widest cell."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _title(plan: Plan) -> str:
    return (
        f"{plan.model}: {plan.global_batch} sequences of {plan.seq_len} tokens per "
        f"step, schedule {plan.schedule}"
    )


def _row(r: int, s: int, replica: Replica, stage: Stage) -> tuple[str, ...]:
    first, end = stage.layers
    return (
        str(r) if s == 0 else "",
        str(s),
        stage.node,
        ",".join(map(str, stage.devices)),
        f"{stage.mesh.data} x {stage.mesh.tensor}",
        f"{first}..{end - 1}",
        stage.remat,
        str(stage.launch_ahead),
        f"{replica.num_microbatches} x {replica.microbatch_size}" if s == 0 else "",
    )
