# SPDX-License-Identifier: Apache-2.0
"""Reads Sailor's profile files: from layer times to `Profile`.

Sailor (eth-easl/sailor) stores `{microbatch: {tensor: {layer: [forward, backward,
update]}}}` in seconds for one GPU kind. Layer 0 is the embedding, the last layer the
head. Owns the reading. Does not own hetjax's own profile file (`layer_profile.py`).
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from hetjax.cluster.catalogue import Precision
from hetjax.costs.measured.layer_profile import Measurement, Profile, check_values
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed
from hetjax.files.reading import read_text
from hetjax.files.tables import as_kind

_TIMES = "three numbers: forward, backward and update seconds"


def sailor_profile(
    path: str | Path,
    *,
    model: str,
    device: str,
    seq_len: int,
    dtype: Precision = "float32",
) -> Profile:
    """Read Sailor's layer times of one model on one GPU kind.

    Inner layers become one kind, `block`, with the mean of their times. Raises BadInput
    for any other file.
    """
    table = _table(path)
    cells = list(_cells(table))
    if not cells:
        raise _bad("no layer times", "microbatch, tensor and layer tables", path)
    num_layers = max(len(layers) for _, _, layers in cells)
    for size, tensor, layers in cells:
        if num_layers < 3 or sorted(layers, key=int) != [
            str(layer) for layer in range(num_layers)
        ]:
            raise _bad(
                f"{len(layers)} layers at microbatch {size}, tensor {tensor}",
                f"layers numbered 0 to {max(num_layers, 3) - 1} everywhere",
                path,
            )
    profile = Profile(
        model=model,
        seq_len=seq_len,
        dtype=dtype,
        layers=tuple(_kind(layer, num_layers) for layer in range(num_layers)),
        measurements=tuple(
            _measurement(device, kind, size, tensor, layers)
            for size, tensor, layers in cells
            for kind in ("embedding", "block", "head")
        ),
    )
    check_values(profile)
    return profile


def _kind(layer: int, num_layers: int) -> str:
    return {0: "embedding", num_layers - 1: "head"}.get(layer, "block")


def _cells(table: dict[str, Any]) -> Iterator[tuple[int, int, dict[str, list[float]]]]:
    """Yield (microbatch size, tensor, seconds by layer) for each entry of the file."""
    for size, degrees in table.items():
        for tensor, layers in as_kind(degrees, "a table", where=size).items():
            where = f"{size}.{tensor}"
            checked = {
                layer: _seconds(times, f"{where}.{layer}")
                for layer, times in as_kind(layers, "a table", where=where).items()
            }
            yield (
                _number(size, "microbatch"),
                _number(tensor, "tensor"),
                {
                    str(_number(layer, "layer")): times
                    for layer, times in checked.items()
                },
            )


def _measurement(
    device: str, kind: str, size: int, tensor: int, layers: dict[str, list[float]]
) -> Measurement:
    times = [
        seconds
        for layer, seconds in layers.items()
        if _kind(int(layer), len(layers)) == kind
    ]
    forward_s, backward_s, update_s = (
        fmean(column) for column in zip(*times, strict=True)
    )
    return Measurement(
        device=device,
        kind=kind,
        tensor=tensor,
        microbatch_size=size,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
    )


def _seconds(raw: object, where: str) -> list[float]:
    times = as_kind(raw, "a list", where=where)
    if len(times) != 3:
        raise BadInput(
            got=f"{where} with {len(times)} entries",
            allowed=_TIMES,
            fix=f"write {where} as [forward, backward, update]",
        )
    return [as_kind(time, "a number", where=where) for time in times]


def _number(text: str, what: str) -> int:
    if text.isdecimal():
        return int(text)
    raise BadInput(
        got=f"{what} {text!r}",
        allowed=f"a {what} in decimal digits",
        fix="give the file of one model on one GPU kind",
    )


def _table(path: str | Path) -> dict[str, Any]:
    raw = parsed(
        read_text(path, what="Sailor file"),
        partial(json_value, finite=False),
        what=f"JSON in {str(path)!r}",
        allowed="JSON as Sailor writes it",
        fix="correct the file there",
    )
    return as_kind(raw, "a table", where="the file")


def _bad(got: str, allowed: str, path: str | Path) -> BadInput:
    return BadInput(
        got=f"Sailor file {str(path)!r}: {got}",
        allowed=allowed,
        fix="give the file of another model",
    )
