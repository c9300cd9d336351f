# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured: 14 OPT-350M runs on GH200 nodes (Sailor's repository).

    python -m experiments.accuracy.gh200 --groundtruth DIR [--json]

DIR holds the published layer times, model dimensions and measured runs; none of it is
part of this repository. The prediction follows a user's path (`referee.py`): the layer
times as a profile, the nodes as a cluster, and no constant that users cannot set. The
study reports three predictions:

* by the catalogue alone, without the layer times: the case of a user who owns no such
  card. The result's rows hold all inputs of this prediction, so a test can repeat it;
* by the published layer times, with the catalogue's network;
* by the layer times, with the nodes' `network_gbit_per_s` chosen on the other runs:
  each (pipeline depth, microbatch size) group is left out in turn.

Memory is predicted twice: with attention as hetjax would compute it on the card
(`chunked` in float32), and with `xla`, which keeps all scores as the measured runs did.

The runs are Megatron-DeepSpeed's, and its peculiarities are not modelled. Its stages
wait while they send and receive, so pipelines of four stages are predicted too fast. It
holds some gigabytes on every device beside its buffers, so runs at small microbatches
are predicted with half of their memory. Layer times include the overhead of timing a
layer alone, so runs of one stage at microbatch 1 are predicted too slow.
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
    model_dims,
    predicted,
    read_ground_truth,
    read_runs,
)
from hetjax.plans.attention import Attention


def study(folder: Path) -> dict[str, Any]:
    """Return all predictions and errors as plain values."""
    truth, runs = read_ground_truth(folder), read_runs(folder)
    alone = GroundTruth(model=truth.model)
    plain = as_is(runs, partial(_predict, truth))
    folds = group_folds(runs, partial(_predict, truth))
    by_catalogue = as_is(runs, partial(_predict, alone))
    scores_kept = as_is(runs, partial(_predict, alone, attention="xla"))
    by_name = {p.run.name: p for fold in folds for p in fold.predictions}
    left_out = [by_name[run.name] for run in runs]
    columns = zip(by_catalogue, scores_kept, plain, left_out, strict=True)
    return {
        "measured": "OPT-350M on GH200 nodes, from eth-easl/sailor (MIT)",
        "command": "python -m experiments.accuracy.gh200 --groundtruth DIR --json",
        "model": model_dims(folder),
        "rows": [_row(*predictions) for predictions in columns],
        "catalogue": {
            **mean_errors(by_catalogue),
            "memory_mape_xla": mean_errors(scores_kept)["memory_mape"],
        },
        "layer_times": mean_errors(plain),
        "leave_one_group_out": {
            **mean_errors(left_out),
            "folds": [fold.summary() for fold in folds],
        },
    }


def _predict(
    truth: GroundTruth,
    run: Run,
    rate: float | None,
    attention: Attention | None = None,
) -> tuple[float, int]:
    return predicted(run, truth, rate, attention)


def _row(
    by_catalogue: Prediction,
    scores_kept: Prediction,
    plain: Prediction,
    left_out: Prediction,
) -> dict[str, Any]:
    run = plain.run
    return {
        "run": run.name,
        "dp": len(run.plan.replicas),
        "pp": len(run.replica.stages),
        "layers_per_stage": [
            stage.layers[1] - stage.layers[0] for stage in run.replica.stages
        ],
        "microbatch": run.replica.microbatch_size,
        "num_microbatches": run.replica.num_microbatches,
        "global_batch": run.plan.global_batch,
        "measured_s": run.measured_s,
        "measured_bytes": run.measured_bytes,
        "catalogue_s": round(by_catalogue.time_s, 5),
        "layer_times_s": round(plain.time_s, 5),
        "left_out_s": round(left_out.time_s, 5),
        "predicted_bytes": by_catalogue.peak_bytes,
        "predicted_bytes_xla": scores_kept.peak_bytes,
    }


def table(result: dict[str, Any]) -> str:
    """Return the rows and the folds as aligned plain text."""
    lines = [
        f"{'run':<12} dp pp mb   m  measured catalogue layer times left out"
        "  measured predicted    xla"
    ]
    for row in result["rows"]:
        measured_s, measured_bytes = row["measured_s"], row["measured_bytes"]
        lines.append(
            f"{row['run']:<12} {row['dp']:>2} {row['pp']:>2} {row['microbatch']:>2}"
            f" {row['num_microbatches']:>3}  {measured_s:7.3f}s"
            f" {row['catalogue_s'] / measured_s - 1:+9.1%}"
            f" {row['layer_times_s'] / measured_s - 1:+11.1%}"
            f" {row['left_out_s'] / measured_s - 1:+8.1%}"
            f"  {measured_bytes / 1e9:6.2f}GB"
            f" {row['predicted_bytes'] / measured_bytes - 1:+9.1%}"
            f" {row['predicted_bytes_xla'] / measured_bytes - 1:+6.1%}"
        )
    part = result["leave_one_group_out"]
    lines += ["", f"each group left out in turn: {_errors(part)}"]
    lines += [
        f"  {fold['left_out']:<17} {_errors(fold)}, at"
        f" {fold['network_gbit_per_s']:g} Gbit/s per node"
        for fold in part["folds"]
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"by the layer times: {_errors(result['layer_times'])}",
            f"by the catalogue alone: {_errors(result['catalogue'])}",
        ]
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
