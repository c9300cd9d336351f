# SPDX-License-Identifier: Apache-2.0
"""The accuracy study of measured runs, on made-up inputs with known answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.accuracy.folds import as_is, group_folds, mean_errors
from experiments.accuracy.published import fitting
from experiments.accuracy.referee import (
    GroundTruth,
    Run,
    predicted,
    read_ground_truth,
    read_runs,
)
from hetjax.models.model import parameter_count

# forward, backward, update seconds of a microbatch of one sequence
LAYERS = {
    "0": [1.0, 1.0, 1.0],
    "1": [2.0, 4.0, 1.0],
    "2": [2.0, 4.0, 1.0],
    "3": [3.0, 5.0, 1.0],
}
DIMS = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_layers": 2,
    "heads": 4,
    "sequence_length": 2048,
}


def row(*, dp: int, cuts: list[int], microbatches: int) -> dict[str, Any]:
    return {
        "upstream_file": f"x/plan_config_N{dp}_{len(cuts)}.json",
        "dp": dp,
        "pp": len(cuts),
        "microbatch": 1,
        "num_microbatches": microbatches,
        "global_batch": dp * microbatches,
        "layers_per_stage": cuts,
        "measured_iteration_s": 1.0,
        "measured_peak_bytes": 1,
    }


def read(folder: Path, *rows: dict[str, Any]) -> tuple[GroundTruth, list[Run]]:
    """Return what the study reads from files in the published form."""
    files = {
        "sailor/profiles_referee/OPT-350/GH-96.json": {"1": {"4": LAYERS}},
        "sailor/models.json": {"OPT-350": DIMS},
        "sailor/measured_opt350_gh200.json": rows,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return read_ground_truth(folder), read_runs(folder)


def test_a_stage_takes_its_microbatches_its_gradient_sum_and_its_update(
    tmp_path: Path,
):
    rows = [row(dp=dp, cuts=[4], microbatches=5) for dp in (1, 2)]
    truth, (alone, both) = read(tmp_path, *rows)
    assert predicted(alone, truth)[0] == pytest.approx(5 * 22.0 + 4.0)
    # two holders exchange all gradients, each through one network card
    size = 4 * sum(map(parameter_count, truth.model.layers))
    slow_gbit_per_s = 1e-5
    sum_s = size / (slow_gbit_per_s * 1e9 / 8)
    assert sum_s > 10
    found_s = predicted(both, truth, slow_gbit_per_s)[0]
    assert found_s == pytest.approx(114.0 + sum_s, rel=1e-4)


def test_messages_cross_once_for_all_four_tensor_ranks(tmp_path: Path):
    truth, (run,) = read(tmp_path, row(dp=1, cuts=[2, 2], microbatches=1))
    slow_gbit_per_s = 1e-5
    message_s = 2048 * 32 * 4 / (slow_gbit_per_s * 1e9 / 8)
    tied_s = 4 * 128 * 32 / (slow_gbit_per_s * 1e9 / 8)
    found_s = predicted(run, truth, slow_gbit_per_s)[0]
    assert found_s == pytest.approx(22 + 2 + 2 * message_s + tied_s, rel=1e-3)


def test_a_group_is_predicted_at_the_rate_that_suits_the_others(tmp_path: Path):
    rows = [row(dp=dp, cuts=cuts, microbatches=2) for dp, cuts in CASES]
    _, runs = read(tmp_path, *rows)

    def predict(run: Run, rate: float | None) -> tuple[float, int]:
        """Predict exactly at 200 for pipelines of two stages, at 50 for one stage."""
        exact = 200.0 if len(run.replica.stages) == 2 else 50.0
        return 1 + abs((rate or 800.0) - exact) / 1000, 2

    folds = group_folds(runs, predict)
    assert [fold.rate_gbit_per_s for fold in folds] == [200.0, 50.0]
    assert [len(fold.predictions) for fold in folds] == [1, 2]
    assert [fold.summary()["time_mape"] for fold in folds] == [0.15, 0.15]
    assert mean_errors(as_is(runs, predict)) == {
        "time_mape": pytest.approx((0.75 + 2 * 0.6) / 3),
        "memory_mape": 1.0,
    }


CASES = [(1, [4]), (1, [2, 2]), (2, [2, 2])]


def test_pairs_of_one_model_are_ordered_if_their_predictions_are():
    cost_N, model_N = np.log([1.0, 2.0, 2.02, 9.0]), np.array([0, 0, 0, 1])
    nobody = np.zeros(4, np.int64)
    rows = fitting.Rows(
        families=("one",),
        surprise_N=np.zeros(4),
        slope_NS=np.zeros((4, 6)),
        family_N=nobody,
        kind_N=nobody,
        model_N=model_N,
        cost_N=cost_N,
    )
    # two pairs count: the third is nearly equal, and the last row has another model
    assert fitting._ordered(rows, np.zeros(4)) == 1.0
    predicted_N = np.log([3.0, 2.5, 4.0, 1.0])  # the first is slower than the second
    assert fitting._ordered(rows, cost_N - predicted_N) == 0.5
    assert fitting._ordered(rows.part(np.array([1, 2])), np.zeros(2)) is None
