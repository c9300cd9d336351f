# SPDX-License-Identifier: Apache-2.0
"""How sure an estimate of memory is, against counting, and against what compilers
needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.compiled_memory.compiling import rows_of
from experiments.compiled_memory.shares import report
from hetjax.cluster.catalogue import Backend
from hetjax.costs.certainty.memory import NUM_STAGES, SHARES, memory_certainty

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
BACKENDS: list[Backend] = ["cpu", "gpu", "tpu"]
EXACT, WORKSPACE = 7e9, 3e9


def drawn_bytes(backend: Backend) -> np.ndarray:
    """Return the bytes of stages with shares spread evenly between percentiles."""
    shares = SHARES[backend]
    places = np.linspace(0, len(shares) - 1, 200_001)
    return EXACT + WORKSPACE * np.interp(places, np.arange(len(shares)), shares)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nine_of_ten_stages_are_within_the_interval_and_as_many_above_as_below(
    backend: Backend,
):
    found = memory_certainty(EXACT, WORKSPACE, None, backend)
    drawn = drawn_bytes(backend)
    assert np.mean(drawn < found.low_bytes) == pytest.approx(0.05, abs=1e-3)
    assert np.mean(drawn > found.high_bytes) == pytest.approx(0.05, abs=1e-3)
    assert found.fits is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "has_bytes", [5e9, 7e9, 8.7e9, 9.2e9, 9.5e9, 9.9e9, 10e9, 2e10]
)
def test_the_probability_of_fitting_is_the_share_of_stages_that_fit(
    backend: Backend, has_bytes: float
):
    found = memory_certainty(EXACT, WORKSPACE, has_bytes, backend)
    counted = float(np.mean(drawn_bytes(backend) <= has_bytes))
    least = 1 / (NUM_STAGES[backend] + 1)  # a count of n says no more
    if has_bytes < EXACT:
        assert found.fits == 0
    else:
        assert found.fits == pytest.approx(np.clip(counted, least, 1 - least), abs=1e-3)


def test_what_the_compiler_reported_is_certain():
    for has_bytes, fits in ((1.1e10, 1.0), (9e9, 0.0), (None, None)):
        found = memory_certainty(EXACT, WORKSPACE, has_bytes, None)
        assert found.low_bytes == found.high_bytes == EXACT + WORKSPACE
        assert found.fits == fits


def test_without_a_workspace_only_exact_bytes_count():
    assert memory_certainty(EXACT, 0.0, EXACT, "gpu").fits == 1.0
    assert memory_certainty(EXACT, 0.0, EXACT - 1, "gpu").fits == 0.0


@pytest.mark.nightly
def test_the_shares_are_those_of_the_stages_that_were_compiled():
    # not those that were compiled again with other kernels (docs/how/compiled.md)
    files = [RESULTS / "compiled_memory.jsonl"]
    files += RESULTS.glob("compiled_memory_draw*.jsonl")
    found = report({path.stem: rows_of(path) for path in files})
    kept = json.loads((RESULTS / "memory_shares.json").read_text(encoding="utf-8"))
    for backend in BACKENDS:
        assert found[backend]["stages"] == NUM_STAGES[backend]
        assert found[backend]["percentiles"] == pytest.approx(SHARES[backend], abs=2e-3)
        assert found[backend]["covered"] == pytest.approx(kept[backend]["covered"])
