# SPDX-License-Identifier: Apache-2.0
"""Logs the run to a run of Weights & Biases, which resumes with it.

Owns what is logged, and its name. Does not own where it is kept, nor whether anything
is sent: wandb's variables decide that (WANDB_PROJECT, WANDB_MODE and others).
"""

import os

import wandb

from hetjax.report.metrics import tracked
from hetjax.training.observers.observer import Observer
from hetjax.training.observers.records import (
    EndRecord,
    EvaluationRecord,
    LostRecord,
    RecoveredRecord,
    SavedRecord,
    StartRecord,
    StepRecord,
)

_STEP = "step"


class WandbObserver(Observer):
    """Logs to a wandb run whose id is the run's identity."""

    def on_start(self, record: StartRecord) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hetjax"),
            id=record.run,
            name=os.environ.get("WANDB_NAME", record.run_dir.name),
            dir=os.environ.get("WANDB_DIR", str(record.run_dir)),
            config=dict(record.settings),
            allow_val_change=True,  # as settings do when a run resumes
            resume="allow",
            reinit="create_new",  # beside any wandb run of the caller
            settings=wandb.Settings(console="off"),
        )
        # wandb's own step only rises, but steps may come again
        self._run.define_metric("*", step_metric=_STEP)

    def on_step(self, record: StepRecord) -> None:
        self._run.log({_STEP: record.step, **tracked(record.metrics)})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._run.log({_STEP: record.step, **tracked(record.metrics)})

    def on_saved(self, record: SavedRecord) -> None:
        self._run.summary["saved_step"] = record.step

    def on_lost(self, record: LostRecord) -> None:
        text = f"worker {record.worker}: {record.reason}"
        self._run.alert("worker lost", f"{text} (step {record.step})")

    def on_recovered(self, record: RecoveredRecord) -> None:
        self._run.log({_STEP: record.step, "events/recovery_seconds": record.seconds})

    def on_end(self, record: EndRecord) -> None:
        self._run.summary["outcome"] = record.outcome
        self._run.finish(exit_code=int(record.outcome == "failed"))
