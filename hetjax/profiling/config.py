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
    """Cluster file, or lab, office or tiny; None: the preset's cluster, or the devices
    found here."""
    simulate: bool = False
    """Simulate the cluster's devices with CPU devices."""
    platform: Literal["auto", "cpu"] = "auto"
    """What to measure on. auto: what JAX finds, but not the CPU if the machine has a
    GPU or TPU that JAX does not use; cpu: the CPU in any case."""
    seq_len: int
    """Tokens per sequence."""
    microbatch_sizes: tuple[int, ...]
    """Sequences per microbatch on each data rank; times for sizes in between are
    interpolated."""
    tensor: tuple[int, ...]
    """Tensor-parallel degrees; those for which a node has too few devices are left
    out."""
    remat: tuple[Remat, ...]
    """What backward passes recompute to save memory."""
    halves: bool = False
    """Also measure the two halves of backward passes, for zero-bubble schedules."""
    dtype: Dtype
    """Precision of computation; best: the best that the devices have, if it is the same
    for all. Weights are kept in float32."""
    output: Path = Path("profile.json")
    """File for the profile; measurements that it already has are kept, not repeated."""


def check_output(config: ProfileConfig) -> None:
    """Raise BadInput if the profile cannot be written to `config.output`."""
    folder, name = config.output.resolve().parent, config.output.name
    if not os.path.isdir(folder):  # False, too, where a name is too long
        raise BadInput(
            got=f"output file {str(config.output)!r}, whose folder does not exist",
            allowed="a file in an existing folder",
            fix=f"mkdir -p {folder}",
        )
    if not os.access(folder, os.W_OK):
        raise BadInput(
            got=f"output file {str(config.output)!r}: cannot write in {str(folder)!r}",
            allowed="a file in a writable folder",
            fix="give --output with another folder",
        )
    if len(name) > _MOST_LETTERS:
        raise BadInput(
            got=f"output file with a name of {len(name)} characters",
            allowed=f"names of at most {_MOST_LETTERS} characters",
            fix="give a shorter --output",
        )
