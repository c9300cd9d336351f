# SPDX-License-Identifier: Apache-2.0
"""Converts settings to JSON values and back, by the types of their fields.

Does not own the settings (`config.py`) nor their file (`rundir.py`).
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hetjax.errors import BadInput, did_you_mean
from hetjax.files.tables import Kind, as_kind, join, kind_of, read_record
from hetjax.training.settings.config import RunConfig


def config_values(config: RunConfig) -> dict[str, Any]:
    """Return the settings as JSON values."""
    return _plain(asdict(config))


# Settings that had other names before; these are read until 0.2.
FORMER_NAMES = {
    "foresee_after_s": "standby_plans_after_s",
    "patience": "timeout_scale",
}


def read_config(raw: object, where: str) -> RunConfig:
    """Read what `config_values` returned; raises BadInput that names the wrong place.

    Settings may have the names that they had when a run began.
    """
    if isinstance(raw, dict):
        raw = {FORMER_NAMES.get(name, name): value for name, value in raw.items()}
    return _record(RunConfig, raw, where)


def warn_of_former_name(former: str, name: str) -> None:
    """Warn that a setting was given by its former name."""
    warnings.warn(
        f"{former} is called {name} now; hetjax 0.2 will drop the former name",
        stacklevel=3,
    )


def changed_config(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the settings with some replaced; groups change by mappings.

    Raises BadInput for an unknown name, and for a value of the wrong type.
    """
    values = config_values(config)
    for given, value in changes.items():
        name = FORMER_NAMES.get(given, given)
        if name != given:
            warn_of_former_name(given, name)
        if name not in values:
            raise _unknown(name, config)
        before, now = values[name], _plain(value)
        if isinstance(before, dict) and isinstance(now, dict):
            now = before | now
        values[name] = now
    return read_config(values, "settings")


def _unknown(name: str, config: RunConfig) -> BadInput:
    inner = [x for x in flat_values(config) if x.rpartition(".")[2] == name]
    group = inner[0].rpartition(".")[0] if inner else ""
    near = did_you_mean(name, list(config_values(config)))
    return BadInput(
        got=f"unknown setting {name!r}",
        allowed="settings as hetjax train tiny --help-all lists them, each group as a "
        "dict",
        fix=f"{group}={{{name!r}: ...}}" if group else near,
    )


def flat_values(config: RunConfig) -> dict[str, Any]:
    """Return dotted name -> JSON value of every setting."""
    found: dict[str, Any] = {}
    for name, value in config_values(config).items():
        if isinstance(value, dict):
            found |= {join(name, key): entry for key, entry in value.items()}
        else:
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, Path) or value == math.inf else value


def _record(cls: Any, raw: object, where: str) -> Any:
    hints = get_type_hints(cls)
    table = as_kind(raw, "a table", where=where)
    # null is allowed only for None, and then needs no check
    empty = {n for n, hint in hints.items() if _is_empty(hint, table.get(n, 0))}
    known: dict[str, Kind] = {n: _kind(h, table.get(n)) for n, h in hints.items()}
    # newer settings have a default: older files lack them
    later = {
        f.name
        for f in fields(cls)
        if f.default is not MISSING or f.default_factory is not MISSING
    }
    present = {name: value for name, value in table.items() if name not in empty}
    read_record(
        present,
        where=where,
        required={n: kind for n, kind in known.items() if n not in later},
        optional={n: kind for n, kind in known.items() if n in later},
    )
    return cls(
        **{n: _value(hints[n], table[n], join(where, n)) for n in hints if n in table}
    )


def _is_empty(hint: Any, value: object) -> bool:
    return value is None and NoneType in get_args(hint)


def _kind(hint: Any, value: object) -> Kind:
    """Return the kind of the JSON value of a setting."""
    if hint is float and value == "inf":  # JSON has no infinite number
        return "a string"
    return kind_of(hint)


def _value(hint: Any, raw: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _record(hint, raw, where)
    if get_origin(hint) is Literal:
        if raw not in get_args(hint):
            known = [str(value) for value in get_args(hint)]
            raise BadInput(
                got=f"{where} = {raw!r}",
                allowed=f"one of {', '.join(known)}",
                fix=did_you_mean(str(raw), known),
            )
        return raw
    if raw is None:
        return None
    options = [option for option in get_args(hint) if option is not NoneType]
    return _value(options[0], raw, where) if options else hint(raw)
