# SPDX-License-Identifier: Apache-2.0
"""Chooses the network's rate on some runs and judges it on others.

Owns the choice and the folds that leave one group out. Does not own the prediction
(`referee.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.accuracy.referee import Run

RATES_GBIT_PER_S = (50.0, 100.0, 150.0, 200.0, 300.0, 400.0, 800.0)

# returns seconds and bytes of a run at a given rate; None takes the catalogue's rate
Predict = Callable[[Run, float | None], tuple[float, int]]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One run, predicted. `rate_gbit_per_s` was chosen without this run; None if the
    catalogue's rate was used."""

    run: Run
    time_s: float
    peak_bytes: int
    rate_gbit_per_s: float | None = None

    @property
    def time_error(self) -> float:
        return self.time_s / self.run.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.peak_bytes / self.run.measured_bytes - 1


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The runs that were left out, predicted at the best rate for the other runs."""

    name: str
    rate_gbit_per_s: float
    predictions: tuple[Prediction, ...]

    def summary(self) -> dict[str, Any]:
        """Return the fold as plain values for JSON."""
        return {
            "left_out": self.name,
            "runs": [p.run.name for p in self.predictions],
            "network_gbit_per_s": self.rate_gbit_per_s,
            **mean_errors(self.predictions),
        }


def mean_errors(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the mean absolute relative errors."""
    return {
        "time_mape": round(fmean(abs(p.time_error) for p in predictions), 4),
        "memory_mape": round(fmean(abs(p.memory_error) for p in predictions), 4),
    }


def as_is(runs: Sequence[Run], predict: Predict) -> list[Prediction]:
    """Predict all runs with nothing but the catalogue's figures."""
    return [_prediction(run, predict, None) for run in runs]


def group_folds(
    runs: Sequence[Run],
    predict: Predict,
    rates: Sequence[float] = RATES_GBIT_PER_S,
) -> list[Fold]:
    """Leave out each (pipeline depth, microbatch size) in turn."""
    at = {
        rate: {run.name: _prediction(run, predict, rate) for run in runs}
        for rate in rates
    }
    folds = []
    for group in sorted({run.group for run in runs}):
        fitted_on = [run.name for run in runs if run.group != group]
        best = min(rates, key=lambda rate: _time_error(at[rate], fitted_on))
        folds.append(
            Fold(
                name="pp {} microbatch {}".format(*group),
                rate_gbit_per_s=best,
                predictions=tuple(
                    at[best][run.name] for run in runs if run.group == group
                ),
            )
        )
    return folds


def _time_error(predictions: dict[str, Prediction], names: Sequence[str]) -> float:
    return fmean(abs(predictions[name].time_error) for name in names)


def _prediction(run: Run, predict: Predict, rate: float | None) -> Prediction:
    time_s, peak_bytes = predict(run, rate)
    return Prediction(
        run=run, time_s=time_s, peak_bytes=peak_bytes, rate_gbit_per_s=rate
    )
