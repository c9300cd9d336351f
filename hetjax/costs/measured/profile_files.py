# SPDX-License-Identifier: Apache-2.0
"""Profile files: JSON to `Profile` and back.

Owns the keys of the file and their types. Does not own what must hold between them
(`profile.py`), nor other programs' profiles (`sailor.py`).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from hetjax.cluster.user_files import (
    Kind,
    did_you_mean,
    join,
    parsed,
    read_fields,
    read_file,
    read_list,
    read_record,
    write_whole,
)
from hetjax.costs.measured.layer_profile import (
    VERSION,
    LinkMeasurement,
    Measurement,
    Profile,
    check_values,
    check_version,
)
from hetjax.errors import BadInput
from hetjax.plans.plan import Remat

_PROFILE: dict[str, Kind] = {
    "version": "an integer",
    "model": "a string",
    "seq_len": "an integer",
    "dtype": "a string",
    "layers": "a list",
    "measurements": "a list",
}
_PROFILE_OPTIONAL: dict[str, Kind] = {"program_s": "a number", "links": "a list"}


def read_profile(path: str | Path) -> Profile:
    """Read a profile file; BadInput starts with the path."""
    return read_file(path, parse_profile, what="profile file")


def parse_profile(text: str) -> Profile:
    """Read the JSON text of a profile; BadInput says where and what."""
    raw = parsed(
        text,
        json.loads,
        what="JSON",
        allowed="JSON: one object with version, model, layers, measurements, ...",
        fix="correct the file there, or measure again: python -m hetjax.profile",
    )
    if isinstance(raw, dict):
        check_version(raw.get("version", VERSION))
    values = read_record(raw, where="", required=_PROFILE, optional=_PROFILE_OPTIONAL)
    profile = Profile(
        model=values["model"],
        seq_len=values["seq_len"],
        dtype=values["dtype"],
        layers=read_list(values["layers"], "a string", where="layers"),
        measurements=tuple(
            _measurement(raw, f"measurements[{i}]")
            for i, raw in enumerate(values["measurements"])
        ),
        links=tuple(
            _link(raw, f"links[{i}]") for i, raw in enumerate(values.get("links", []))
        ),
        program_s=values.get("program_s", 0.0),
        version=values["version"],
    )
    check_values(profile)
    return profile


def profile_json(profile: Profile) -> str:
    """Write the JSON text that reads back as the same profile: a line per entry."""
    check_values(profile)
    values = {key: value for key, value in asdict(profile).items() if key in _PROFILE}
    lists = {key: values.pop(key, []) for key in ("measurements", "links")}
    lists["links"] = [asdict(link) for link in profile.links]
    head = {"version": values.pop("version"), **values, "program_s": profile.program_s}
    lines = [f"  {json.dumps(key)}: {json.dumps(head[key])}" for key in head]
    for key, entries in lists.items():
        rows = [json.dumps(_without_none(entry), allow_nan=False) for entry in entries]
        body = ",\n".join(f"    {row}" for row in rows)
        lines.append(f'  "{key}": [\n{body}\n  ]' if rows else f'  "{key}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write the profile file whole or not at all."""
    write_whole(path, profile_json(profile))


def _measurement(raw: object, where: str) -> Measurement:
    values = read_fields(raw, Measurement, where=where)
    remat = values.get("remat", "none")
    if remat not in get_args(Remat):
        raise BadInput(
            got=f"{where}.remat = {remat!r}",
            allowed=f"remat is one of {', '.join(get_args(Remat))}",
            fix=did_you_mean(remat, get_args(Remat)),
        )
    return Measurement(**values)


def _link(raw: object, where: str) -> LinkMeasurement:
    values = read_fields(raw, LinkMeasurement, where=where)
    ends = read_list(values.pop("between"), "a string", where=join(where, "between"))
    if len(ends) != 2:
        raise BadInput(
            got=f"{where}.between with {len(ends)} names",
            allowed="two names: from, to",
            fix='write "between": ["a100-0", "t4-0"]',
        )
    return LinkMeasurement(between=(ends[0], ends[1]), **values)


def _without_none(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}
