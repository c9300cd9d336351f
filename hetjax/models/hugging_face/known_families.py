# SPDX-License-Identifier: Apache-2.0
"""The families of Hugging Face that we know: the files of `families/`.

Owns how they are found, and which of them tells a model that never had a `config.json`.
Imports no JAX.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from hetjax.errors import BadInput
from hetjax.models import families
from hetjax.models.configs import DecoderConfig, LlamaConfig, numbers
from hetjax.models.families.shared.family import Family


@cache
def known_families() -> Mapping[str, Family]:
    """All of them, by `model_type`: each module beside `shared/` has one."""
    found = (
        import_module(f"{families.__name__}.{module.name}").FAMILY
        for module in iter_modules(families.__path__)
        if not module.ispkg
    )
    return {family.model_type: family for family in found}


@cache
def families_with_eyes() -> Mapping[str, Family]:
    """Families that are what reads of others, by the `model_type` of the latter."""
    all_of_them = known_families().values()
    return {family.with_eyes: family for family in all_of_them if family.with_eyes}


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    """Return a `config.json` for a model that never had one.

    It is that of the plainest family that has all that the model has: of fewest fields.
    BadInput if there is none.
    """
    written = [_written_as(family, config) for family in known_families().values()]
    found = min((fields for fields in written if fields), key=len, default=None)
    if found is None:
        raise BadInput(
            got=f"model {config.name}, which no family of Hugging Face is like",
            allowed=f"what a {', '.join(known_families())} can be",
            fix="take its weights from its checkpoint: hetjax.checkpoint.reader",
        )
    return found


def _written_as(family: Family, config: DecoderConfig) -> dict[str, Any] | None:
    """The fields of the model as one of the family, if that has all that it has."""
    if not isinstance(config, family.config):
        return None
    own = family.write(config)
    if own is None:
        return None
    fields = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **own,
    }
    read = family.read(family.fields(fields, config.name))
    return fields if _written_numbers(read) == _written_numbers(config) else None


def _written_numbers(config: DecoderConfig) -> dict[str, Any]:
    """What a `config.json` can say; it knows no limit of what an expert takes."""
    if isinstance(config, LlamaConfig) and config.routing is not None:
        routing = replace(config.routing, capacity_factor=None)
        config = replace(config, routing=routing)
    return numbers(config)
