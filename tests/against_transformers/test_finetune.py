# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning from end to end: losses and logits against torch and PEFT."""

from pathlib import Path
from typing import Any

import pytest

from experiments.finetune.__main__ import adapters, fully, prepare
from tests.short_runs import draws


@pytest.mark.parametrize("fine_tuned", draws([fully, adapters], short=1))
def test_a_killed_run_on_unlike_devices_ends_as_torch_does(
    fine_tuned: Any, tmp_path: Path
):
    base, rows = prepare(tmp_path / "made")
    found = fine_tuned(base, rows, tmp_path / "made/run")
    first, last = (found["losses"][step][1] for step in (1, len(found["losses"])))
    assert last < 0.8 * first
    assert found["most_apart_loss"] < 1e-5
    assert found["most_apart_logits"] < 1e-3 * found["greatest_logit"]
