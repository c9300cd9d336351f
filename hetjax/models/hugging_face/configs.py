# SPDX-License-Identifier: Apache-2.0
"""Reads the `config.json` of Hugging Face models as our configs.

Owns where the fields are, and that each is read by its family, refused by name, or
named once as left out. Does not own what they mean (`families/`) nor weights
(`tensor_names.py`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, toml_table
from hetjax.files.reading import Unreadable, decoded, read_bytes
from hetjax.models.configs import DecoderConfig
from hetjax.models.families.shared.fields import Fields
from hetjax.models.hugging_face.adapter_config import has_adapters, read_adapter_config
from hetjax.models.hugging_face.known_families import families_with_eyes, known_families
from hetjax.models.hugging_face.own_head import has_own_head
from hetjax.models.hugging_face.quantised_folders import SETTINGS, check_settings
from hetjax.models.hugging_face.stored_tensors import has_weights

CONFIG = "config.json"
_OF_THE_WHOLE = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def read_config(path: Path) -> tuple[DecoderConfig, dict[str, Any]]:
    """Return the model's sizes and all fields, from a `config.json` or its folder.

    A TOML file with the same fields will do, too. A folder's head that differs from its
    embedding is not tied, whatever the fields say. Raises BadInput if there is no
    config, and for an unknown family, fields that our models do not support, and a
    folder with quantised weights.
    """
    if has_adapters(path):
        adapters = read_adapter_config(path)
        raise BadInput(
            got=f"model {str(path)!r}: adapters of PEFT for {adapters.base}",
            allowed="the folder of a model; adapters are initial weights",
            fix=f"hetjax train {adapters.base} --init {path}",
        )
    file = path / CONFIG if path.is_dir() else path
    parse = toml_table if file.suffix == ".toml" else json_value
    try:
        raw = parse(decoded(read_bytes(file, what="model"), f"model {str(path)!r}"))
    except Unreadable:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(
            got=f"model {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            allowed=f"a folder with a {CONFIG} of Hugging Face, that file, or a TOML "
            "with its fields",
            fix="give its path; hetjax train --help says what else names a model",
        ) from None
    is_folders = file.name == CONFIG
    name = file.parent.resolve().name if is_folders else file.resolve().stem
    settings = raw
    raw = _of_text(raw, name)
    config, unread = _read(raw, name)
    if unread:
        _warn_once(
            f"model {name!r}: hetjax does not support {', '.join(sorted(unread))} of "
            f"its {CONFIG} and ignores them"
        )
    if not path.is_dir() or not has_weights(path):
        return config, _of_whole_weights(name, raw)
    check_settings(path, settings)
    return _as_stored(path, config, raw)


def _of_whole_weights(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Drop the quantisation settings, as there are no quantised weights here."""
    if raw.get(SETTINGS):
        _warn_once(f"model {name!r}: {SETTINGS} is ignored, only its sizes are used")
    return {key: value for key, value in raw.items() if key != SETTINGS}


def _as_stored(
    folder: Path, config: DecoderConfig, raw: dict[str, Any]
) -> tuple[DecoderConfig, dict[str, Any]]:
    """Return sizes and fields, not tied where the folder stores a head of its own."""
    try:
        embedding = (
            known_families()[raw["model_type"]].tensors.ends["embedding.table"].theirs
        )
        if not config.tied or not has_own_head(folder, embedding):
            return config, raw
    except BadInput as error:  # code that uses the weights will refuse them
        _warn_once(f"{error.got}: its head counts as tied, as its {CONFIG} says")
        return config, raw
    _warn_once(
        f"{folder}: lm_head.weight differs from the embedding, so it is not tied, "
        f"although {CONFIG} says it is; set tie_word_embeddings = false there"
    )
    return replace(config, tied=False), {**raw, "tie_word_embeddings": False}


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Warn once: a command reads the same folder several times."""
    warnings.warn(text, stacklevel=3)


def _of_text(raw: Any, name: str) -> Any:
    """Return all fields or, of a model with vision, its text part's and shared ones."""
    kind = str(raw.get("model_type")) if isinstance(raw, Mapping) else "none"
    family = families_with_eyes().get(kind)
    if family is None:
        return raw
    of_whole = {key: raw[key] for key in _OF_THE_WHOLE if key in raw}
    text = Fields(raw, name).get("text_config", {})
    return {**of_whole, **text, "architectures": [family.architecture]}


def config_of(raw: Any, name: str) -> DecoderConfig:
    """Return the sizes of a model from the fields of its `config.json`."""
    return _read(raw, name)[0]


def _read(raw: Any, name: str) -> tuple[DecoderConfig, list[str]]:
    """Return the sizes, and the names of fields that were not read."""
    kind = str(raw.get("model_type")) if isinstance(raw, Mapping) else "none"
    family = known_families().get(kind)
    if family is None:
        raise BadInput(
            got=f"model {name!r}: model_type {kind!r}",
            allowed=", ".join(sorted([*known_families(), *families_with_eyes()])),
            fix="give a model of one of these families",
        )
    fields = family.fields(raw, name)
    try:
        return family.read(fields), fields.unread()
    except KeyError as missing:
        raise BadInput(
            got=f"model {name!r}: no field {missing} in {CONFIG}",
            allowed=f"a complete {CONFIG} of a {kind}",
            fix="fetch the file again",
        ) from None
