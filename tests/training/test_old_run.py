# SPDX-License-Identifier: Apache-2.0
"""A run directory that hetjax wrote in November 2026 resumes without any difference.

`runs/2026_11.tar.xz` is the run of `small_preset`, stopped after 5 of 10 steps by the
code before rooms, settings and recovery were renamed. `LOSSES` are those of the same
run by the same code without a stop.
"""

import tarfile
from pathlib import Path

import pytest

from hetjax.training.directory.journal import read_journal
from hetjax.training.session import run
from tests.training.small import MODEL, lines, losses, small_preset

ARCHIVE = Path(__file__).parent / "runs" / "2026_11.tar.xz"
LOSSES = {
    1: 5.76555331548055,
    2: 5.760708808898926,
    3: 5.75403372446696,
    4: 5.657917022705078,
    5: 5.539682706197103,
    6: 5.407331307729085,
    7: 5.323497772216797,
    8: 5.341961701711019,
    9: 5.2120944658915205,
    10: 5.27373727162679,
}


def test_an_old_run_goes_on_with_the_losses_that_it_would_have_had(tmp_path: Path):
    preset = small_preset(tmp_path)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    before = read_journal(preset.config.run_dir / "events.jsonl")
    assert run(preset.config, preset, MODEL) == 0
    found = {step: loss for step, (loss, _) in losses(preset.config.run_dir).items()}
    assert found == pytest.approx(LOSSES, rel=1e-5)
    events = lines(preset.config.run_dir / "events.jsonl")
    assert events[: len(before)] == before
    assert "restored" in [event["event"] for event in events[len(before) :]]
