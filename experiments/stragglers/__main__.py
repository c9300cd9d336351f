# SPDX-License-Identifier: Apache-2.0
"""Replays two real jobs with and without their stragglers, and names the culprits.

    python -m experiments.stragglers --groundtruth DIR [--json]

Reads `traces/` of the folder: two jobs of ByteDance with 8 and 64 GPUs, and what their
authors publish of them. `detector` has the findings of hetjax's own detector on the
times of the same steps, where every stage of every replica counts as equal work. It
sees the time of each operation, but not which operation waits for which.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.stragglers.replay import WhatIf, replay
from experiments.stragglers.trace import Trace, read_trace
from hetjax.costs.slowness.detector import Detector
from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.step_times import Lane, Lanes, StepTimes

_JOBS = ("ST", "AR")
_WATCHED = {"forward-compute": "F", "backward-compute": "B"}
_PUBLISHED = (
    "measured_mean_s",
    "replay_mean_s",
    "replay_error",
    "straggler_free_mean_s",
    "slowdown",
    "Ms",
    "Mw",
    "culprit",
)


def study(groundtruth: Path) -> dict[str, Any]:
    """Return the result, as JSON values."""
    folder = groundtruth / "traces"
    published = json.loads((folder / "straggler_published.json").read_text())
    of_job = {row["job"]: row for row in published["jobs"]}
    return {
        "command": "python -m experiments.stragglers --groundtruth DIR --json",
        "source": published["source"],
        "jobs": {
            job: _job(read_trace(folder / f"straggler_{job}.json.gz"))
            | {"published": {key: of_job[job][key] for key in _PUBLISHED}}
            for job in _JOBS
        },
    }


def _job(trace: Trace) -> dict[str, Any]:
    found = WhatIf(trace)
    replayed_S = replay(trace, found.own_SDO)
    measured_s = float(trace.step_S.mean())
    return {
        "steps": len(trace.step_S),
        "measured_s": _rounded(measured_s),
        "replayed_s": _rounded(found.replayed_s),
        "error": _rounded(found.replayed_s / measured_s - 1),
        "worst_error": _rounded(float(np.abs(replayed_S / trace.step_S - 1).max())),
        "without_stragglers_s": _rounded(found.ideal_s),
        "slowdown": _rounded(found.slowdown),
        "slowdown_by_replica": _all_rounded(found.by_replica()),
        "slowdown_by_stage": _all_rounded(found.by_stage()),
        "last_stage_cures": _rounded(found.last_stage_cures()),
        "worst_workers_cure": _rounded(found.worst_workers_cure()),
        "culprit": found.culprit(),
        "detector": [str(finding) for finding in detected(trace)],
    }


def detected(trace: Trace) -> list[Slowdown]:
    """Let the detector watch the steps of a trace, counted as they come."""
    every = [(d, int(s)) for d in range(trace.num_replicas) for s in {*trace.stage_O}]
    lanes = (
        Lane(key=key, node=f"dp{key[0]}-stage{key[1]}", devices=(0,), work="equal")
        for key in every
    )
    detector = Detector()
    detector.begin(Lanes(tuple(lanes)))
    types = np.array([op.type for op in trace.ops])
    found = []
    for number, took_DO in enumerate(trace.duration_SDO, start=1):
        parts = {
            (d, s, kind): float(
                took_DO[d][(trace.stage_O == s) & (types == name)].sum()
            )
            for d, s in every
            for name, kind in _WATCHED.items()
        }
        found += detector.add(StepTimes(step=number, parts=parts, links={}))
    return found


def _rounded(value: float) -> float:
    return round(value, 5)


def _all_rounded(values: dict[int, float]) -> dict[str, float]:
    return {str(key): _rounded(value) for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groundtruth", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = study(given.groundtruth)
    if given.json:
        print(json.dumps(result, indent=1))
        return
    for job, row in result["jobs"].items():
        print(
            f"{job}: {row['measured_s']:.3f} s measured, {row['replayed_s']:.3f} s "
            f"replayed ({row['error']:+.2%}), {row['without_stragglers_s']:.3f} s "
            f"without stragglers; culprit: {row['culprit']}"
        )
        for line in row["detector"]:
            print(f"  {line}")


if __name__ == "__main__":
    main()
