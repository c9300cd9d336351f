# SPDX-License-Identifier: Apache-2.0
"""Writes event files of the run, which `tensorboard --logdir RUNS` shows.

Owns where they are, and that repeated steps replace the former ones. Does not own the
format of the files, which is tensorboardX's.
"""

import time
from pathlib import Path

from tensorboardX import SummaryWriter

from hetjax.report.metrics import tracked
from hetjax.training.observers.observer import Observer
from hetjax.training.observers.records import (
    EndRecord,
    EvaluationRecord,
    LostRecord,
    RecoveredRecord,
    StartRecord,
    StepRecord,
)

_FOLDER = "tensorboard"
_FLUSH_S = 10


class TensorBoardObserver(Observer):
    """Writes to `folder`, or to `tensorboard` in the run directory."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self._folder = folder

    def on_start(self, record: StartRecord) -> None:
        self._to = str(self._folder or record.run_dir / _FOLDER)
        self._open(record.step)
        settings = "\n".join(f"    {k} = {v}" for k, v in record.settings.items())
        self._writer.add_text("settings", settings, record.step)

    def on_step(self, record: StepRecord) -> None:
        self._write(record)
        if record.skipped is not None:
            self._writer.add_text("train/skipped", record.skipped, record.step)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._write(record)

    def on_lost(self, record: LostRecord) -> None:
        text = f"{record.worker}: {record.reason}"
        self._writer.add_text("events/lost", text, record.step)

    def on_recovered(self, record: RecoveredRecord) -> None:
        self._writer.close()
        self._open(record.step)
        self._writer.add_text("events/recovered", record.reason, record.step)

    def on_end(self, record: EndRecord) -> None:
        self._writer.close()

    def _open(self, step: int) -> None:
        """Start a file; TensorBoard drops the later steps of earlier files."""
        self._writer = SummaryWriter(
            self._to,
            purge_step=step + 1,
            flush_secs=_FLUSH_S,
            # otherwise a second file within one second would replace the first
            filename_suffix=f".{time.time_ns()}",
        )

    def _write(self, record: StepRecord | EvaluationRecord) -> None:
        for name, value in tracked(record.metrics).items():
            self._writer.add_scalar(name, value, record.step)
