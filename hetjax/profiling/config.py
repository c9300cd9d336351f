# SPDX-License-Identifier: Apache-2.0
"""The settings of `hetjax profile`: what to measure of a model.

Owns the choices and their help texts. Does not own the values of a preset
(`hetjax/training/settings/presets.py`) nor the measuring (`measuring.py`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetjax.errors import BadInput
from hetjax.plans.plan import Remat
from hetjax.plans.precision import Dtype

_MOST_LETTERS = 200  # of a file's name; the name of its draft is longer


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to measure; every combination of the lists is measured."""

    cluster: Path | None = None
    """Cluster file, or lab, office or tiny; None: the preset's, or the devices here."""
    simulate: bool = False
    """Let CPU devices stand in for those of the cluster."""
    platform: Literal["auto", "cpu"] = "auto"
    """What to measure on. auto: what JAX finds, but never the CPU of a machine whose
    GPU or TPU JAX does not use; cpu: the CPU, whatever else there is."""
    seq_len: int
    """Tokens per sequence."""
    microbatch_sizes: tuple[int, ...]
    """Sequences per data rank; times between two sizes are interpolated."""
    tensor: tuple[int, ...]
    """Tensor-parallel degrees; those that a node is too small for are left out."""
    remat: tuple[Remat, ...]
    """What the backward pass computes again."""
    halves: bool = False
    """Measure the halves of backward passes too, for zero-bubble schedules."""
    dtype: Dtype
    """Precision of computation; best: what the devices do best, if that is one. Weights
    are always kept in float32."""
    output: Path = Path("profile.json")
    """Write the profile here; what the file has already is kept, not measured again."""


def check_output(config: ProfileConfig) -> None:
    """Raise BadInput if the profile cannot be written to `config.output`."""
    folder = config.output.resolve().parent
    if not os.access(folder, os.W_OK) or len(config.output.name) > _MOST_LETTERS:
        raise BadInput(
            got=f"output file {str(config.output)!r}: cannot write in {str(folder)!r}",
            allowed="a file in a folder that is there and can be written",
            fix="give another --output, or make the folder",
        )
