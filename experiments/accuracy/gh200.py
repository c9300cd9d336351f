# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured: 14 OPT-350M runs on GH200 nodes (Sailor's repository).

    python -m experiments.accuracy.gh200 --groundtruth DIR [--json]

DIR holds the published layer times, model dimensions and measured runs; none of it is
part of this repository. The prediction goes the way that users go (`referee.py`): the
layer times as a profile, the nodes as a cluster, and no constant that users cannot set.
Reported as the catalogue has it, and with the nodes' `network_gbit_per_s` chosen on the
other runs: each (pipeline depth, microbatch size) group is left out in turn.

The runs are Megatron-DeepSpeed's, and what is particular to it is not modelled: its
stages wait while they send and receive (pipelines of four stages are predicted too
fast), it holds some gigabytes on every device beside its buffers (runs at small
microbatches are predicted with half of their memory), and layer times include what it
takes to time a layer alone (runs of one stage at microbatch 1 are predicted too slow).
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.accuracy.folds import Prediction, as_is, group_folds, mean_errors
from experiments.accuracy.referee import (
    GroundTruth,
    Run,
    predicted,
    read_ground_truth,
    read_runs,
)


def study(folder: Path) -> dict[str, Any]:
    """Return all predictions and errors as plain values."""
    runs, predict = read_runs(folder), partial(_predict, read_ground_truth(folder))
    plain, folds = as_is(runs, predict), group_folds(runs, predict)
    by_name = {p.run.name: p for fold in folds for p in fold.predictions}
    left_out = [by_name[run.name] for run in runs]
    return {
        "measured": "OPT-350M on GH200 nodes, from eth-easl/sailor (MIT)",
        "command": "python -m experiments.accuracy.gh200 --groundtruth DIR --json",
        "rows": [_row(*pair) for pair in zip(plain, left_out, strict=True)],
        "catalogue": mean_errors(plain),
        "leave_one_group_out": {
            **mean_errors(left_out),
            "folds": [fold.summary() for fold in folds],
        },
    }


def _predict(truth: GroundTruth, run: Run, rate: float | None) -> tuple[float, int]:
    return predicted(run, truth, rate)


def _row(plain: Prediction, left_out: Prediction) -> dict[str, Any]:
    run = plain.run
    return {
        "run": run.name,
        "replicas": len(run.plan.replicas),
        "stages": len(run.replica.stages),
        "microbatch_size": run.replica.microbatch_size,
        "num_microbatches": run.replica.num_microbatches,
        "measured_s": run.measured_s,
        "predicted_s": round(left_out.time_s, 5),
        "time_error": round(left_out.time_error, 4),
        "catalogue_s": round(plain.time_s, 5),
        "catalogue_time_error": round(plain.time_error, 4),
        "measured_bytes": run.measured_bytes,
        "predicted_bytes": left_out.peak_bytes,
        "memory_error": round(left_out.memory_error, 4),
    }


def table(result: dict[str, Any]) -> str:
    """Return the rows and the folds as aligned plain text."""
    lines = [
        f"{'run':<12} dp pp mb   m  measured predicted  error catalogue"
        "  measured predicted  error"
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['run']:<12} {row['replicas']:>2} {row['stages']:>2}"
            f" {row['microbatch_size']:>2} {row['num_microbatches']:>3}"
            f"  {row['measured_s']:7.3f}s {row['predicted_s']:8.3f}s"
            f" {row['time_error']:+6.1%} {row['catalogue_time_error']:+9.1%}"
            f" {row['measured_bytes'] / 1e9:7.2f}GB"
            f" {row['predicted_bytes'] / 1e9:7.2f}GB {row['memory_error']:+6.1%}"
        )
    part = result["leave_one_group_out"]
    lines += ["", f"each group left out in turn: {_errors(part)}"]
    lines += [
        f"  {fold['left_out']:<17} {_errors(fold)}, at"
        f" {fold['network_gbit_per_s']:g} Gbit/s per node"
        for fold in part["folds"]
    ]
    return "\n".join(
        [*lines, "", f"as the catalogue has it: {_errors(result['catalogue'])}"]
    )


def _errors(part: dict[str, Any]) -> str:
    return f"time {part['time_mape']:.1%}, memory {part['memory_mape']:.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groundtruth", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    given = parser.parse_args(arguments)
    result = study(given.groundtruth)
    print(json.dumps(result, indent=1) if given.json else table(result))


if __name__ == "__main__":
    main()
