# SPDX-License-Identifier: Apache-2.0
"""Runs `hetjax train` twice: once stopped and resumed, once without a stop.

Owns the commands and the comparison of losses. Does not own what is restored
(`hetjax/checkpoint/`).
"""

import json
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.gpu.rows import Row, without_names
from experiments.gpu.setting import Setting
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.presets import model_config
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import METRICS

_SAME = "a run that was stopped and resumed: losses of one that was not"
_STEPS, _STOP_AFTER = 6, 3
_STOPPED = 4  # the exit code of a run that was stopped with its state saved
_MODULES = ("argparse", "json", "pathlib", "tarfile")  # their manuals are the text
_LEAST_S = 15.0


def stopped_and_resumed(setting: Setting) -> Iterator[Row]:
    if setting.left_s() < _LEAST_S:
        yield Row(what=_SAME, measured=None, note="no time was left")
        return
    with setting.scratch() as scratch:
        _write(scratch)
        try:
            whole, resumed = _both_losses(setting, scratch)
        except subprocess.CalledProcessError as failed:
            note = f"exit code {failed.returncode}; {without_names(failed.output)}"
            yield Row(what=_SAME, measured=None, note=note)
            return
    yield Row(
        what=_SAME,
        measured=resumed == whole,
        note=f"{len(whole)} steps of tiny, stopped after {_STOP_AFTER}",
    )
    distances = [abs(resumed[step] - loss) for step, loss in whole.items()]
    what = "a run that was stopped and resumed: largest difference of a loss"
    yield Row(what=what, measured=max(distances))


def _write(scratch: Path) -> None:
    """Write the text and the model. Preset `tiny` would bring its own cluster where
    there is no card."""
    manuals = [pydoc.plain(pydoc.render_doc(module)) for module in _MODULES]
    (scratch / "manual.txt").write_text("\n".join(manuals), encoding="utf-8")
    (scratch / "model").mkdir()
    fields = json.dumps(fields_of(model_config("tiny")))
    (scratch / "model" / "config.json").write_text(fields, encoding="utf-8")


def _both_losses(
    setting: Setting, scratch: Path
) -> tuple[dict[int, float], dict[int, float]]:
    """Train without a stop and, at the same time, with one; return losses by step."""
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(_train, setting, scratch, "whole")
        _train(setting, scratch, "stopped", "--stop-after", str(_STOP_AFTER))
        resumed = _train(setting, scratch, "stopped")
        return whole.result(), resumed


def _train(
    setting: Setting, scratch: Path, run: str, *options: str
) -> dict[int, float]:
    """Run the command; return the losses of all the run's steps so far."""
    directory = scratch / run
    command = [sys.executable, "-m", "hetjax.train", str(scratch / "model"), *options]
    command += ["--run-dir", str(directory), "--steps", str(_STEPS)]
    command += ["--planner", "even", "--microbatch-size", "4", "--global-batch", "8"]
    command += ["--seq-len", "64", "--data.path", str(scratch / "manual.txt")]
    command += ["--data.cache-dir", str(scratch / "cache")]
    command += ["--evaluation.num-batches", "1", "--evaluation.sample-tokens", "0"]
    command += ["--platform", "cpu"] if setting.platform == "cpu" else []
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode not in (0, _STOPPED):
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    lines = read_journal(directory / METRICS)
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
