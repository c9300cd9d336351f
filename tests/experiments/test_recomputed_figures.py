# SPDX-License-Identifier: Apache-2.0
"""Figures that need only a processor: computed again, against their results.

`docs/figures.md` marks such results with "Machine: any; it computes", and
`tests/docs/test_figures.py` compares the page with the results.
"""

import json
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from experiments.accuracy.referee import (
    GroundTruth,
    Run,
    model_of_size,
    plan_of_row,
    predicted,
)
from experiments.finetune import plans
from hetjax.plans.attention import Attention

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
PAGE = Path(__file__).parents[2] / "docs" / "figures.md"
# the clock ends a search's last phase, so a plan may differ a little
SEARCHED = 0.02


@cache
def published() -> dict[str, Any]:
    return json.loads((RESULTS / "accuracy_gh200.json").read_text(encoding="utf-8"))


def by_catalogue(row: dict[str, Any], attention: Attention | None) -> tuple[float, int]:
    run = Run(row["run"], plan_of_row(row), row["measured_s"], row["measured_bytes"])
    truth = GroundTruth(model=model_of_size(published()["model"]))
    return predicted(run, truth, attention=attention)


@pytest.mark.parametrize("row", published()["rows"], ids=lambda row: row["run"])
def test_published_runs_are_predicted_by_the_catalogue_as_the_result_says(
    row: dict[str, Any],
):
    """Releases of JAX trace up to 80 kB of 8 GB more or less."""
    time_s, peak_bytes = by_catalogue(row, None)
    assert time_s == pytest.approx(row["catalogue_s"], rel=1e-3)
    assert peak_bytes == pytest.approx(row["predicted_bytes"], rel=2e-5)
    _, with_xla = by_catalogue(row, "xla")
    assert with_xla == pytest.approx(row["predicted_bytes_xla"], rel=2e-5)


@pytest.mark.parametrize(
    "error, value, measured",
    [
        ("time_mape", "catalogue_s", "measured_s"),
        ("memory_mape", "predicted_bytes", "measured_bytes"),
        ("memory_mape_xla", "predicted_bytes_xla", "measured_bytes"),
    ],
)
def test_mean_errors_are_those_of_the_rows(error: str, value: str, measured: str):
    rows = published()["rows"]
    mean = fmean(abs(row[value] / row[measured] - 1) for row in rows)
    assert published()["catalogue"][error] == pytest.approx(mean, abs=1e-3)


def planned() -> dict[str, Any]:
    return json.loads((RESULTS / "finetune_plans.json").read_text(encoding="utf-8"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(plans.CASES))
def test_plans_for_fine_tuning_are_those_of_the_result(name: str):
    found, expected = plans.row(name), planned()["cases"][name]
    assert found["tokens_per_s"] == pytest.approx(
        expected["tokens_per_s"], rel=SEARCHED
    )


def test_gradients_of_fine_tuning_have_the_bytes_of_the_result():
    # rank 16 beside q, k, v, o, gate, up and down of 32 blocks: two factors each
    dims = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
    dims += 3 * [(4096, 14336)]
    assert planned()["gradient_bytes"]["lora"] == 4 * 32 * 16 * sum(map(sum, dims))


def test_every_figure_of_any_machine_is_computed_again_here():
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    free = [text for text in sections if "\n* Machine: any; it computes\n" in text]
    files = {"accuracy_gh200.json", "finetune_plans.json"}
    assert len(free) == len(files)
    for file in files:
        assert any(file in text for text in free)
