# SPDX-License-Identifier: Apache-2.0
"""Reads traces of real training jobs: operations, their dependencies and times.

Owns the form of the files (`README-2.md` of the ground truth, section "traces"; data of
ByteDance's StragglerAnalysis, Apache-2.0, which are not part of this repository). Does
not own their analysis (`replay.py`).
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of one data-parallel replica; those in `after` must end first."""

    stage: int
    type: str
    after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Communication that ends together, over all replicas if it is `across_dp`."""

    ops: tuple[int, ...]
    across_dp: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """S steps of a job of D data-parallel replicas with the same O operations.

    Times are seconds; starts are relative to their step. A step takes `step_S`.
    """

    ops: tuple[Operation, ...]
    groups: tuple[Group, ...]
    start_SDO: Floats
    duration_SDO: Floats
    step_S: Floats

    @property
    def num_replicas(self) -> int:
        return self.start_SDO.shape[1]

    @property
    def stage_O(self) -> NDArray[np.int64]:
        return np.array([op.stage for op in self.ops])

    def members(self) -> list[list[tuple[int, int]]]:
        """Return groups of (replica, operation) that end together."""
        found = []
        for group in self.groups:
            every = [[(d, o) for o in group.ops] for d in range(self.num_replicas)]
            found += (
                [[pair for of in every for pair in of]] if group.across_dp else every
            )
        return found


def read_trace(path: Path) -> Trace:
    """Read a trace."""
    return parse_trace(json.loads(gzip.decompress(path.read_bytes())))


def parse_trace(raw: dict[str, Any]) -> Trace:
    """Return the trace that a file's JSON values describe."""
    return Trace(
        ops=tuple(
            Operation(stage=op["stage"], type=op["type"], after=tuple(op["after"]))
            for op in raw["ops"]
        ),
        groups=tuple(
            Group(ops=tuple(group["ops"]), across_dp=group["across_dp"])
            for group in raw["groups"]
        ),
        start_SDO=np.array(raw["start_us"]) / 1e6,
        duration_SDO=np.array(raw["duration_us"]) / 1e6,
        step_S=np.array(raw["step_time_us"]) / 1e6,
    )
