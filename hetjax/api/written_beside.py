# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer and generation settings into an exported folder.

The settings are those of the folder that the run began with, as long as the run has
that folder's tokenizer, too. Does not own weights (`exporting.py`).
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetjax.data.hugging_face import CONFIG as TOKENIZER_CONFIG
from hetjax.data.hugging_face import FILES, TOKENIZER
from hetjax.data.tokenizer import END_OF_DOCUMENT, load
from hetjax.errors import BadInput
from hetjax.files.parsing import read_json
from hetjax.models.hugging_face.adapter_config import base_folder
from hetjax.models.hugging_face.hub import local_folder
from hetjax.training.settings.config import RunConfig

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def first_folder(config: RunConfig) -> Path | None:
    """Return the folder of the model that a run began with, if it is still there."""
    name = config.init
    if name is None:
        return Path(config.model) if Path(config.model).is_dir() else None
    try:
        return base_folder(local_folder(name))
    except BadInput:
        return None


def write_beside(
    folder: Path, run_dir: Path, config: RunConfig, fields: Mapping[str, Any]
) -> None:
    """Write the run's tokenizer, and the tokens that begin and end a text; `fields` are
    those of the model's `config.json`."""
    for name in FILES:
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, folder / name)
    ids = {name: fields[name] for name in _IDS if fields.get(name) is not None}
    if not (folder / TOKENIZER_CONFIG).exists() and (folder / TOKENIZER).exists():
        words = {"tokenizer_class": "PreTrainedTokenizerFast"}
        words["eos_token"] = END_OF_DOCUMENT
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(words, indent=2) + "\n")
        ids["eos_token_id"] = load(folder / TOKENIZER).end_of_document
    settings = _settings(first_folder(config), folder, ids)
    (folder / GENERATION).write_text(json.dumps(settings, indent=2) + "\n")


def _settings(
    first: Path | None, folder: Path, ids: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the generation settings of the initial folder, with the `ids` of another
    tokenizer if the run changed it."""
    if first is None or not (first / GENERATION).is_file():
        return ids
    fix = "fetch the file again, or remove it"
    kept = read_json(first / GENERATION, what="generation settings", fix=fix)
    if not isinstance(kept, Mapping):
        raise BadInput(
            got=f"{str(first / GENERATION)!r}, which is not a JSON object",
            allowed="a JSON object with generation settings",
            fix=fix,
        )
    if _bytes(first / TOKENIZER) == _bytes(folder / TOKENIZER):
        return kept
    return {**{name: kept[name] for name in kept.keys() - {*_IDS}}, **ids}


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
