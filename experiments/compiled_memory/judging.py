# SPDX-License-Identifier: Apache-2.0
"""Our figures beside the compilers', and margins that are fitted without one kind.

Owns what a total is, the fit, and the report. Does not own the model, which is the
product's own and is asked anew for every row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from experiments.compile.stages import OPTIMIZER
from experiments.compiled_memory.cells import MemoryCell, backend_of, model_and_plan
from hetjax.costs.graph.passes import passes, split_passes
from hetjax.costs.stage_memory import stage_memory, stage_shares
from hetjax.costs.workspace import MARGINS, pass_bytes
from hetjax.plans.plan import segments, segments_of
from hetjax.stage.partition import stage_stacks

LEAST, MOST = -0.02, 0.10  # of a total


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A cell's bytes: what lives through the step and in flight, which is known to the
    byte; the largest pass's workspace by our model without margin, and by the compiler.
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
    """Ask the model for a row's stage."""
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
        predicted_bytes=pass_bytes(traced, cell.mesh[1], backend_of(cell.target)),
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
        backend=backend_of(cell.target),
    )
    fused = cell.place == "last" and not cell.split
    held = memory.input_bytes if fused else memory.saved_bytes
    passing = memory.input_bytes + 2 * memory.output_bytes
    half = memory.half_saved_bytes if cell.split else 0
    return memory.static_bytes + cell.in_flight * held + passing + half
