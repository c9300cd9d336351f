# SPDX-License-Identifier: Apache-2.0
"""Reads back the settings of a run whose directory or first model may have moved.

A run directory keeps the fields of its model's `config.json`, so `eval`, `sample` and
`export` need the folder that the run began with only for weights that the run keeps
frozen. Owns this copy and its use. Does not own the check of frozen weights
(`frozen_base.py`) nor a run that resumes (`start.py`).
"""

import json
from dataclasses import replace
from pathlib import Path

from hetjax.files.writing import write_whole
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.named import is_function, is_path
from hetjax.training.directory.rundir import MODEL, Previous
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.run_settings import saves_all_weights


def keep_model(config: RunConfig) -> None:
    """Write the fields of the model's `config.json` to the run directory, if the model
    is a file or a folder. Raises BadInput if that cannot be read."""
    if is_path(config.model) and not is_function(config.model):
        _, fields = read_config(Path(config.model))
        text = json.dumps(fields, indent=2, allow_nan=False)
        write_whole(config.run_dir / MODEL, text + "\n")


def reopened(previous: Previous, run_dir: Path) -> RunConfig:
    """Return the settings of the run that is now in `run_dir`.

    If the model that it began with is gone, the model is the copy in the directory.
    """
    config = replace(previous.config, run_dir=run_dir)
    if saves_all_weights(config) and config.init and _is_gone(config.init):
        config = replace(config, init=None)
    if _is_gone(config.model) and (run_dir / MODEL).exists():
        config = replace(config, model=str(run_dir / MODEL))
    return config


def _is_gone(name: str) -> bool:
    """Return whether the name is the path of a folder or file that is not there."""
    return Path(name).is_absolute() and not Path(name).exists()
