# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured: 14 OPT-350M runs on GH200 nodes (Sailor's repository).

    python -m experiments.accuracy.gh200 --groundtruth DIR [--json]

DIR holds the published layer times, layer bytes, link fits and measured runs; none of
it is part of this repository. Every prediction is of a run that its constants were
fitted without: by alternate rows (two folds), then with each (pipeline depth,
microbatch size) group left out in turn. Five constants are fitted (`referee.py` says
what each is): two on iteration times, one on the measured gradient sums, two on peak
memory. Times are the simulator's and peaks the memory model's, as for any plan.

Read the figures with this in mind. Upstream's forward times at microbatches 1 to 4
look set by hand; its other profile has other values there and gives 8.1 %
over both folds, so the runs at microbatch 8, free of that doubt, are reported apart.
The model was chosen with all runs at hand. Tried and not kept, by the same two folds
(3.2 % as kept): seconds per message in place of `message_share` 4.2 %, messages that
do not block their stages 4.2 % (with a share of 0.26 to make up for it), a factor on
all layer times in place of `timing_s` 5.2 %, host seconds per pass in its place 5.0 %
(fitted to 0). `sync_share` fitted to iteration times as well gives 3.1 %, but a share
that no measured sum bears out. The tied embedding's sum is left out (some 2 ms). What
is missed: the run at microbatch 2 is too fast in every fold, and the runs of one stage
at microbatch 1 too slow unless they help to fit `timing_s`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.accuracy.folds import (
    Prediction,
    alternate_folds,
    group_folds,
    mean_errors,
    unfitted,
)
from experiments.accuracy.referee import read_ground_truth, read_runs

TIME_LIMIT, MEMORY_LIMIT = 0.06, 0.08


def study(folder: Path) -> dict[str, Any]:
    """Return all predictions and errors as plain values."""
    truth, runs = read_ground_truth(folder), read_runs(folder)
    folds = alternate_folds(runs, truth)
    by_name = {p.run.name: p for fold in folds for p in fold.predictions}
    predictions = [by_name[run.name] for run in runs]
    errors = mean_errors(predictions)
    groups = group_folds(runs, truth)
    return {
        "measured": "OPT-350M on GH200 nodes, from eth-easl/sailor (MIT)",
        "command": "python -m experiments.accuracy.gh200 --groundtruth DIR --json",
        "rows": [_row(p) for p in predictions],
        "two_folds": {
            **errors,
            "time_limit": TIME_LIMIT,
            "memory_limit": MEMORY_LIMIT,
            "passes": errors["time_mape"] <= TIME_LIMIT
            and errors["memory_mape"] <= MEMORY_LIMIT,
            "microbatch_8": mean_errors(
                [p for p in predictions if p.run.replica.microbatch_size == 8]
            ),
            "folds": [fold.summary() for fold in folds],
        },
        "leave_one_group_out": {
            **mean_errors([p for fold in groups for p in fold.predictions]),
            "folds": [fold.summary() for fold in groups],
        },
        "nothing_fitted": mean_errors(unfitted(runs, truth)),
    }


def _row(prediction: Prediction) -> dict[str, Any]:
    run = prediction.run
    return {
        "run": run.name,
        "replicas": len(run.plan.replicas),
        "stages": len(run.replica.stages),
        "microbatch_size": run.replica.microbatch_size,
        "num_microbatches": run.replica.num_microbatches,
        "measured_s": run.measured_s,
        "predicted_s": round(prediction.time_s, 5),
        "time_error": round(prediction.time_error, 4),
        "measured_bytes": run.measured_bytes,
        "predicted_bytes": round(prediction.peak_bytes),
        "memory_error": round(prediction.memory_error, 4),
    }


def table(result: dict[str, Any]) -> str:
    """Return the rows and the folds as aligned plain text."""
    lines = [
        f"{'run':<12} dp pp mb   m  measured predicted  error"
        "  measured predicted  error"
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['run']:<12} {row['replicas']:>2} {row['stages']:>2}"
            f" {row['microbatch_size']:>2} {row['num_microbatches']:>3}"
            f"  {row['measured_s']:7.3f}s {row['predicted_s']:8.3f}s"
            f" {row['time_error']:+6.1%}"
            f" {row['measured_bytes'] / 1e9:7.2f}GB"
            f" {row['predicted_bytes'] / 1e9:7.2f}GB {row['memory_error']:+6.1%}"
        )
    lines += ["", *_fold_lines("two folds by alternate rows", result["two_folds"])]
    lines += _fold_lines("each group left out in turn", result["leave_one_group_out"])
    errors = result["two_folds"]["microbatch_8"]
    lines.append(f"two folds, runs at microbatch 8 alone: {_errors(errors)}")
    lines.append(f"nothing fitted: {_errors(result['nothing_fitted'])}")
    return "\n".join(lines)


def _fold_lines(title: str, part: dict[str, Any]) -> list[str]:
    lines = [f"{title}: {_errors(part)}"]
    for fold in part["folds"]:
        c = fold["constants"]
        lines.append(
            f"  {fold['left_out']:<17} {_errors(fold)}; fitted:"
            f" timing {c['timing_s'] * 1e3:.3f} ms, message share"
            f" {c['message_share']:.2f}, sync share {c['sync_share']:.2f},"
            f" framework {c['framework_bytes'] / 1e9:.2f} GB,"
            f" saved x{c['saved_factor']:.3f}"
        )
    return [*lines, ""]


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
