# SPDX-License-Identifier: Apache-2.0
"""Compares predictions, and their certainty, with published runs of other frameworks.

    python -m experiments.accuracy.published --groundtruth DIR [--json]

DIR holds the published rows; none of it is part of this repository. The study leaves
out each family in turn and predicts it from a fit to the others. For each family it
prints predicted over measured time, the share of rows within their 90 % intervals, the
median interval as a factor up and down, the share of pairs in the right order, and the
error of memory where it was published. Takes two minutes of CPU time.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.accuracy.published.fitting import (
    SPEEDS,
    Family,
    Rows,
    fixed_band,
    leave_one_out,
    widths_of_all,
)
from experiments.accuracy.published.predicting import Predicted, predicted
from experiments.accuracy.published.rows import published_runs
from hetjax.plans.table import aligned

_PERCENTS = ("ordered", "learnt_ordered", "memory_error")
_CHIPS = {"GH200": "H100", "GeForce": "RTX", "TITAN": "RTX"}  # kinds of one generation


def main() -> None:
    """Print the table, or everything as JSON."""
    parser = argparse.ArgumentParser(description="Predicted against measured.")
    parser.add_argument("--groundtruth", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = study([predicted(run) for run in published_runs(options.groundtruth)])
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(table(found)))


def study(predictions: Sequence[Predicted]) -> dict[str, Any]:
    """Return all results as plain values."""
    rows = rows_of(predictions)
    families = leave_one_out(rows)
    covered = fmean(family.covered for family in families)
    memory = {f.name: _memory_error(predictions, f.name) for f in families}
    return {
        "command": "python -m experiments.accuracy.published --groundtruth DIR --json",
        "rows": len(predictions),
        "error": round(fmean(family.error for family in families), 4),
        "learnt_error": round(fmean(family.learnt_error for family in families), 4),
        "covered": round(covered, 4),
        "factor": round(float(np.median([f.factor for f in families])), 4),
        "fixed_band_of_equal_coverage": round(fixed_band(rows, covered), 4),
        "ratios_covered": round(fmean(f.ratios_covered for f in families), 4),
        "ordered": _mean(family.ordered for family in families),
        "learnt_ordered": _mean(family.learnt_ordered for family in families),
        "memory_error": _mean(memory.values()),
        "widths": widths_of_all(rows),
        "families": [
            _rounded(family) | {"memory_error": memory[family.name]}
            for family in families
        ],
    }


def _mean(values: Iterable[float | None]) -> float:
    return round(fmean(value for value in values if value is not None), 4)


def _memory_error(predictions: Sequence[Predicted], family: str) -> float | None:
    """Return the mean error of the family's predicted memory; None if it is unknown."""
    errors = [
        abs(p.peak_bytes / p.run.measured_bytes - 1)
        for p in predictions
        if p.run.family == family
        if p.peak_bytes is not None and p.run.measured_bytes is not None
    ]
    return round(fmean(errors), 4) if errors else None


def rows_of(predictions: Sequence[Predicted]) -> Rows:
    """Return the predictions as arrays."""
    families = list(dict.fromkeys(p.run.family for p in predictions))
    chips = [_chip(p) for p in predictions]
    kinds = list(dict.fromkeys(chips))
    models = list(dict.fromkeys(p.run.model.name for p in predictions))
    return Rows(
        families=tuple(families),
        surprise_N=np.array([np.log(p.run.measured_s / p.time_s) for p in predictions]),
        slope_NS=-np.array([[_slope(p, name) for name in SPEEDS] for p in predictions]),
        family_N=np.array([families.index(p.run.family) for p in predictions]),
        kind_N=np.array([kinds.index(chip) for chip in chips]),
        model_N=np.array([models.index(p.run.model.name) for p in predictions]),
        cost_N=np.log([p.run.device_s_per_token for p in predictions]),
    )


def table(found: dict[str, Any]) -> list[str]:
    """Format the families as a table for people."""
    header = ("family", "rows", "min", "median", "max", "below 1", "error", "learnt")
    header += ("in 90 %", "factor", "ratios in 90 %", "factor", "ordered", "learnt")
    header += ("memory error",)
    lines = [
        (
            family["name"],
            str(family["rows"]),
            *(f"{family[key]:.2f}" for key in ("least", "median", "most")),
            str(family["below_one"]),
            *(f"{family[key]:.1%}" for key in ("error", "learnt_error", "covered")),
            f"{family['factor']:.2f}",
            f"{family['ratios_covered']:.1%}",
            f"{family['ratios_factor']:.2f}",
            *map(_share, (family[key] for key in _PERCENTS)),
        )
        for family in found["families"]
    ]
    return [
        *aligned(header, lines),
        "",
        f"mean error of a family {found['error']:.1%}, learnt from the others "
        f"{found['learnt_error']:.1%}; {found['covered']:.1%} of rows in their 90 % "
        f"intervals, of factor {found['factor']:.2f} (a fixed band of as many: "
        f"{found['fixed_band_of_equal_coverage']:.2f})",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rounded(family: Family) -> dict[str, Any]:
    return {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in asdict(family).items()
    }


def _chip(prediction: Predicted) -> str:
    device = prediction.run.cluster.nodes[0].device
    prefix = device.split("-")[0]
    return _CHIPS.get(prefix, prefix)


def _slope(prediction: Predicted, name: str) -> float:
    return sum(s for (_, speed), s in prediction.elasticities.items() if speed == name)


if __name__ == "__main__":
    main()
