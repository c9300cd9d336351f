# SPDX-License-Identifier: Apache-2.0
"""Defines measured profiles: the times of a model's distinct layers by device kind.

Owns the `Profile` tree, its checks, the look-up between measured microbatch sizes, and
the JSON of profile files. Does not own other programs' profiles (`sailor.py`), the
measuring, nor a stage's use of its layers' times.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from hetjax.cluster import ranges
from hetjax.cluster.catalogue import Precision, canonical_name
from hetjax.errors import BadInput, did_you_mean
from hetjax.files.parsing import json_value, parsed, read_file
from hetjax.files.tables import Kind, join, read_fields, read_list, read_record
from hetjax.files.writing import write_whole
from hetjax.plans.plan import Remat

VERSION = 1
# a run's dtypes of compute, with their bytes
DTYPES: dict[Precision, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROFILE: dict[str, Kind] = {
    "version": "an integer",
    "model": "a string",
    "seq_len": "an integer",
    "dtype": "a string",
    "layers": "a list",
    "measurements": "a list",
}
_PROFILE_OPTIONAL: dict[str, Kind] = {"program_s": "a number", "links": "a list"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One kind of layer on one device kind: seconds of one microbatch, one update.

    `microbatch_size` counts sequences per data rank. `update_s` covers the parameters
    and optimizer state that one of `data` ranks holds, without the sums over ranks;
    `shared_update_s` is the same for a layer that several replicas hold. This, the two
    halves of a split backward, and the largest workspace are None if not measured.
    """

    device: str
    kind: str
    tensor: int
    data: int = 1
    microbatch_size: int
    remat: Remat = "none"
    forward_s: float
    backward_s: float
    update_s: float
    input_gradient_s: float | None = None
    weight_gradient_s: float | None = None
    workspace_bytes: int | None = None
    shared_update_s: float | None = None

    def at_speed(self, factor: float) -> "Measurement":
        """Return the measurement of a layer that runs `factor` times as fast."""
        if factor == 1.0:
            return self
        seconds = {key: getattr(self, key) for key in _SECONDS}
        known = {key: value for key, value in seconds.items() if value is not None}
        return replace(self, **{key: value / factor for key, value in known.items()})


_SECONDS = tuple(f.name for f in fields(Measurement) if f.name.endswith("_s"))
_RANGES = {
    "tensor": ranges.COUNT,
    "data": ranges.COUNT,
    "microbatch_size": ranges.SEQUENCES,
    "workspace_bytes": ranges.BYTES,
    **dict.fromkeys(_SECONDS, ranges.SECONDS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasurement:
    """A link from one node or device kind to another: one direction."""

    between: tuple[str, str]  # from, to
    bandwidth_gbit_per_s: float
    latency_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """All measurements of one model.

    `layers` is the kind of each layer in order, such as embedding, block, block, head;
    equal kinds are measured once. `program_s` is the host's cost to enqueue a program.
    """

    model: str
    seq_len: int
    dtype: Precision
    layers: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    links: tuple[LinkMeasurement, ...] = ()
    program_s: float = 0.0
    version: int = VERSION

    @property
    def devices(self) -> frozenset[str]:
        """The measured device kinds, by the catalogue's names."""
        return frozenset(canonical_name(m.device) for m in self.measurements)


def profile_with(profile: Profile | None, device: str) -> Profile | None:
    """Return the profile if it has measured devices of this kind, otherwise None."""
    if profile is None or canonical_name(device) not in profile.devices:
        return None
    return profile


def check_profile(profile: Profile, model: str, seq_len: int, num_layers: int) -> None:
    """Raise BadInput if the profile is of another model than the plan's."""
    got = (profile.model, profile.seq_len, len(profile.layers))
    if got == (model, seq_len, num_layers):
        return
    raise BadInput(
        got="a profile of model {!r}, sequence length {}, {} layers".format(*got),
        allowed=f"one of model {model!r}, sequence length {seq_len}, "
        f"{num_layers} layers",
        fix=f"measure it: python -m hetjax.profile {model}, or give another --profile",
    )


def measured(
    profile: Profile,
    *,
    device: str,
    kind: str,
    tensor: int,
    microbatch_size: int,
    remat: Remat = "none",
    data: int = 1,
) -> Measurement:
    """Return the layer's measurement at a microbatch size, interpolated linearly.

    `device` may be any of the catalogue's names. If `data` was not measured, the
    measurement on one data rank is used, whose update is too long. Raises BadInput if
    no measurement fits.
    """
    wanted = canonical_name(device), kind, tensor, remat
    fits = [
        m
        for m in profile.measurements
        if (canonical_name(m.device), m.kind, m.tensor, m.remat) == wanted
    ]
    for ranks in (data, 1):
        row = sorted(
            (m for m in fits if m.data == ranks), key=lambda m: m.microbatch_size
        )
        low = [m for m in row if m.microbatch_size <= microbatch_size]
        high = [m for m in row if m.microbatch_size >= microbatch_size]
        if low and high:
            return _between(low[-1], high[0], microbatch_size)
    raise _not_measured(
        profile,
        f"{kind!r} on {device!r} with tensor {tensor}, remat {remat!r}, "
        f"{microbatch_size} sequences per data rank",
        device,
        kind,
        f"--microbatch-sizes {microbatch_size} --tensor {tensor} --remat {remat}",
    )


def _between(low: Measurement, high: Measurement, microbatch_size: int) -> Measurement:
    """Return the linear interpolation of both at the microbatch size."""
    span = high.microbatch_size - low.microbatch_size
    share = (microbatch_size - low.microbatch_size) / span if span else 0.0

    def mix(key: str) -> float | None:
        start, end = getattr(low, key), getattr(high, key)
        if start is None or end is None:
            return None
        return start + share * (end - start)

    workspace = mix("workspace_bytes")
    values: dict[str, Any] = {key: mix(key) for key in _SECONDS}
    return replace(
        low,
        microbatch_size=microbatch_size,
        workspace_bytes=None if workspace is None else round(workspace),
        **values,
    )


def _not_measured(
    profile: Profile, wanted: str, device: str, kind: str, options: str
) -> BadInput:
    """Return the error for a look-up without measurement; it shows the nearest ones."""
    name = canonical_name(device)
    near = [
        m
        for m in profile.measurements
        if (canonical_name(m.device), m.kind) == (name, kind)
    ]
    if near:
        sizes: dict[tuple[int, str], list[int]] = {}
        for m in near:
            sizes.setdefault((m.tensor, m.remat), []).append(m.microbatch_size)
        allowed = f"for {kind!r} on {device!r}: " + "; ".join(
            f"tensor {tensor}, remat {remat!r}, {min(of)} to {max(of)} sequences"
            for (tensor, remat), of in sorted(sizes.items())
        )
    else:
        devices = sorted({m.device for m in profile.measurements})
        kinds = sorted({m.kind for m in profile.measurements})
        allowed = f"devices: {', '.join(devices)}; layers: {', '.join(kinds)}"
    return BadInput(
        got=f"the profile of {profile.model!r} has no {wanted}",
        allowed=f"what was measured, {allowed}",
        fix="measure it too, on such a device: python -m hetjax.profile "
        f"{profile.model} {options}, or simulate without --profile",
    )


def check_version(version: object) -> None:
    """Raise BadInput if the file's version is not the one that this program reads."""
    if version != VERSION or isinstance(version, bool):
        raise _bad(
            f"version = {version!r}",
            f"version {VERSION}",
            "measure again: python -m hetjax.profile",
        )


def check_values(profile: Profile) -> None:
    """Raise BadInput for numbers out of range, unknown kinds and repeats."""
    check_version(profile.version)
    if profile.dtype not in DTYPES:
        raise _bad(
            f"dtype = {profile.dtype!r}",
            f"one of {', '.join(DTYPES)}, the dtypes of a run's compute",
            did_you_mean(profile.dtype, list(DTYPES)),
        )
    _check_number(profile.seq_len, "seq_len", ranges.TOKENS)
    _check_number(profile.program_s, "program_s", ranges.SECONDS)
    for i, link in enumerate(profile.links):
        for key, range_ in ranges.LINK.items():
            _check_number(getattr(link, key), f"links[{i}].{key}", range_)
    for i, m in enumerate(profile.measurements):
        _check_measurement(m, f"measurements[{i}]", profile.layers)
    _check_repeats(profile)


def _check_measurement(m: Measurement, where: str, layers: tuple[str, ...]) -> None:
    if m.kind not in layers:
        kinds = sorted(set(layers))
        raise _bad(
            f"{where}.kind = {m.kind!r}",
            f"a kind that `layers` names: {', '.join(kinds) or 'none there'}",
            did_you_mean(m.kind, kinds) if kinds else "fill in `layers`",
        )
    for key, range_ in _RANGES.items():
        value = getattr(m, key)
        if value is not None:
            _check_number(value, join(where, key), range_)
    if (m.input_gradient_s is None) != (m.weight_gradient_s is None):
        raise _bad(
            f"{where} with only one half of the backward pass",
            "both input_gradient_s and weight_gradient_s, or neither",
            f"add the other half to {where}, or remove this one",
        )


def _check_repeats(profile: Profile) -> None:
    counts = Counter(
        (canonical_name(m.device), m.kind, m.tensor, m.data, m.microbatch_size, m.remat)
        for m in profile.measurements
    )
    for key, times in counts.items():
        if times > 1:
            shown = "{!r} {!r} tensor {} data {} size {} remat {!r}".format(*key)
            raise _bad(f"{times} measurements of {shown}", "one", "remove the others")


def _check_number(value: float, where: str, range_: ranges.Range) -> None:
    if not range_.has(value):
        raise _bad(f"{where} = {value:g}", range_.allowed(where), f"correct {where}")


def _bad(got: str, allowed: str, fix: str) -> BadInput:
    return BadInput(got=got, allowed=allowed, fix=fix)


def read_profile(path: str | Path) -> Profile:
    """Read a profile file; a BadInput error starts with the path."""
    return read_file(path, parse_profile, what="profile file")


def parse_profile(text: str) -> Profile:
    """Read the JSON text of a profile; BadInput says where the error is."""
    raw = parsed(
        text,
        partial(json_value, finite=False),
        what="JSON",
        allowed="JSON: one object with version, model, layers, measurements, ...",
        fix="correct the file there, or measure again: python -m hetjax.profile",
    )
    if isinstance(raw, dict):
        check_version(raw.get("version", VERSION))
    values = read_record(raw, where="", required=_PROFILE, optional=_PROFILE_OPTIONAL)
    values["layers"] = read_list(values["layers"], "a string", where="layers")
    for key, read in (("measurements", _measurement), ("links", _link)):
        entries = enumerate(values.get(key, ()))
        values[key] = tuple(read(entry, f"{key}[{i}]") for i, entry in entries)
    profile = Profile(**values)
    check_values(profile)
    return profile


def profile_json(profile: Profile) -> str:
    """Return JSON text that reads back as the same profile, with a line per entry."""
    check_values(profile)
    values = {key: value for key, value in asdict(profile).items() if key in _PROFILE}
    lists = {
        "measurements": values.pop("measurements"),
        "links": [asdict(link) for link in profile.links],
    }
    head = {"version": values.pop("version"), **values, "program_s": profile.program_s}
    lines = [f"  {json.dumps(key)}: {json.dumps(head[key])}" for key in head]
    for key, entries in lists.items():
        rows = [json.dumps(_without_none(entry), allow_nan=False) for entry in entries]
        body = ",\n".join(f"    {row}" for row in rows)
        lines.append(f'  "{key}": [\n{body}\n  ]' if rows else f'  "{key}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write the profile file completely or not at all."""
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
