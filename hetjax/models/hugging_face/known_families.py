# SPDX-License-Identifier: Apache-2.0
"""Finds the families of Hugging Face that we know: the files of `families/`.

Owns the search, and the choice of the family that describes a model without a
`config.json`. Imports no JAX.
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
    """Return all families by `model_type`: each module beside `shared/` has one."""
    found = (
        import_module(f"{families.__name__}.{module.name}").FAMILY
        for module in iter_modules(families.__path__)
        if not module.ispkg
    )
    return {family.model_type: family for family in found}


@cache
def families_with_eyes() -> Mapping[str, Family]:
    """Return the families of vision models' text parts, by the vision `model_type`."""
    all_of_them = known_families().values()
    return {family.with_eyes: family for family in all_of_them if family.with_eyes}


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    """Return a `config.json` for a model that never had one.

    Of the families that can describe the model it is the one with the fewest fields.
    Raises BadInput if there is none.
    """
    written = [_written_as(family, config) for family in known_families().values()]
    found = min((fields for fields in written if fields), key=len, default=None)
    if found is None:
        raise BadInput(
            got=f"model {config.name}, which no family of Hugging Face describes",
            allowed=f"a model that one of {', '.join(known_families())} describes",
            fix="take its weights from its checkpoint: hetjax.checkpoint.reader",
        )
    return found


def _written_as(family: Family, config: DecoderConfig) -> dict[str, Any] | None:
    """Return the model's fields as one of the family, None if the family lacks some."""
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
    """Return the numbers that a `config.json` can express: no capacity of experts."""
    if isinstance(config, LlamaConfig) and config.routing is not None:
        routing = replace(config.routing, capacity_factor=None)
        config = replace(config, routing=routing)
    return numbers(config)
