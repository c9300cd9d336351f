# SPDX-License-Identifier: Apache-2.0
"""Imports layer times that another program has measured into a profile of ours.

Owns the check that they belong to the given model, and the merge into an existing
profile. Does not own the reading of their files (`costs/measured/sailor.py`).
"""

from dataclasses import replace
from pathlib import Path

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.costs.measured.layer_profile import Profile, write_profile
from hetjax.costs.measured.sailor import sailor_profile
from hetjax.errors import BadInput, did_you_mean
from hetjax.models.model import Model
from hetjax.profiling.config import ProfileConfig
from hetjax.profiling.measuring import kept_profile


def import_sailor(
    config: ProfileConfig, model: Model, file: Path, device: str | None
) -> Profile:
    """Write Sailor's layer times of the model on a device kind into the output file.

    Measurements of other kinds in the file are kept. Raises BadInput for times of
    another model.
    """
    found = sailor_profile(
        file,
        model=model.name,
        device=_known(device),
        seq_len=config.seq_len,
        # Sailor measures in float32; the user may know better
        dtype="float32" if config.dtype == "best" else config.dtype,
    )
    if len(found.layers) != len(model.layers):
        raise BadInput(
            got=f"Sailor file {str(file)!r} with {len(found.layers)} layers",
            allowed=f"{len(model.layers)} layers, as {model.name} has: the embedding, "
            "the blocks and the head",
            fix="give the model that was measured: a folder or config.json of Hugging "
            "Face, or a TOML file with its fields, in place of the preset",
        )
    kept = kept_profile(config, replace(found, measurements=()))
    others = [
        m for m in kept.measurements if canonical_name(m.device) not in found.devices
    ]
    profile = replace(kept, measurements=(*others, *found.measurements))
    write_profile(config.output, profile)
    return profile


def _known(device: str | None) -> str:
    if device is None:
        raise BadInput(
            got="--sailor without --device",
            allowed="the measured kind of device, which the file does not name",
            fix="add --device A100-SXM4-40GB, say",
        )
    name = canonical_name(device)
    if name not in catalogue():
        raise BadInput(
            got=f"--device {device}",
            allowed="one kind of device of the catalogue",
            fix=did_you_mean(device, list(catalogue())),
        )
    return name
