# SPDX-License-Identifier: Apache-2.0
"""Fitting the five constants on some runs and judging them on others.

Owns the fit, the two folds by alternate rows and the folds that leave one group out.
Does not own the prediction (`referee.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from experiments.accuracy.referee import (
    Constants,
    GroundTruth,
    Run,
    predicted_bytes,
    predicted_s,
    ring_s,
)

# Errors beyond this count by their size, not its square: the measure is absolute, and
# one odd run should not bend the constants of all others
_LINEAR_BEYOND = 0.05


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One run, predicted with constants that were fitted without it."""

    run: Run
    time_s: float
    peak_bytes: float

    @property
    def time_error(self) -> float:
        return self.time_s / self.run.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.peak_bytes / self.run.measured_bytes - 1


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The runs that were left out, and the constants fitted on the others."""

    name: str
    constants: Constants
    predictions: tuple[Prediction, ...]

    def summary(self) -> dict[str, Any]:
        """Return the fold as plain values for JSON."""
        return {
            "left_out": self.name,
            "runs": [p.run.name for p in self.predictions],
            "constants": asdict(self.constants),
            **mean_errors(self.predictions),
        }


def mean_errors(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the mean absolute relative errors."""
    return {
        "time_mape": fmean(abs(p.time_error) for p in predictions),
        "memory_mape": fmean(abs(p.memory_error) for p in predictions),
    }


def alternate_folds(runs: list[Run], truth: GroundTruth) -> list[Fold]:
    """Fit on the even rows and predict the odd ones, and the reverse."""
    even, odd = runs[0::2], runs[1::2]
    return [_fold("odd", even, odd, truth), _fold("even", odd, even, truth)]


def group_folds(runs: list[Run], truth: GroundTruth) -> list[Fold]:
    """Leave out each (pipeline depth, microbatch size) in turn."""
    folds = []
    for group in sorted({run.group for run in runs}):
        left_out = [run for run in runs if run.group == group]
        others = [run for run in runs if run.group != group]
        name = "pp {} microbatch {}".format(*group)
        folds.append(_fold(name, others, left_out, truth))
    return folds


def unfitted(runs: list[Run], truth: GroundTruth) -> tuple[Prediction, ...]:
    """Predict all runs with no constant fitted at all."""
    return _predictions(runs, truth, Constants())


def fit(runs: Sequence[Run], truth: GroundTruth) -> Constants:
    """Return the constants that suit these runs best."""
    sync_share = median(
        ring_s(run, truth) / run.measured_sync_s
        for run in runs
        if len(run.plan.replicas) > 1
    )

    def time_constants(x: np.ndarray) -> Constants:
        return Constants(
            timing_s=float(x[0]) * 1e-3,
            message_share=float(x[1]),
            sync_share=sync_share,
        )

    def memory_constants(x: np.ndarray) -> Constants:
        return Constants(framework_bytes=float(x[0]) * 1e9, saved_factor=float(x[1]))

    def time_errors(x: np.ndarray) -> list[float]:
        constants = time_constants(x)
        return [predicted_s(run, truth, constants) / run.measured_s - 1 for run in runs]

    def memory_errors(x: np.ndarray) -> list[float]:
        constants = memory_constants(x)
        return [
            predicted_bytes(run, truth, constants) / run.measured_bytes - 1
            for run in runs
        ]

    time = time_constants(_least(time_errors, [0.1, 0.8]))
    memory = memory_constants(_least(memory_errors, [1.0, 1.0]))
    return Constants(
        timing_s=time.timing_s,
        message_share=time.message_share,
        sync_share=sync_share,
        framework_bytes=memory.framework_bytes,
        saved_factor=memory.saved_factor,
    )


def _least(errors: Any, start: list[float]) -> np.ndarray:
    found = least_squares(
        errors,
        start,
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=_LINEAR_BEYOND,
        diff_step=1e-5,  # bytes are whole numbers
    )
    assert found.success, found.message
    return found.x


def _fold(
    name: str, fitted_on: list[Run], left_out: list[Run], truth: GroundTruth
) -> Fold:
    constants = fit(fitted_on, truth)
    return Fold(
        name=name,
        constants=constants,
        predictions=_predictions(left_out, truth, constants),
    )


def _predictions(
    runs: Sequence[Run], truth: GroundTruth, constants: Constants
) -> tuple[Prediction, ...]:
    return tuple(
        Prediction(
            run=run,
            time_s=predicted_s(run, truth, constants),
            peak_bytes=predicted_bytes(run, truth, constants),
        )
        for run in runs
    )
