# SPDX-License-Identifier: Apache-2.0
"""What of a model is measured: one frozen set of choices, and those of a preset.

Owns the choices and their help texts. Does not own the measuring (`profiling.py`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetjax.errors import BadInput
from hetjax.plans.files import read_plan
from hetjax.plans.plan import Plan, Remat
from hetjax.training.presets import Preset

_MOST_LETTERS = 200  # of a file's name, its draft's being longer


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to measure; every combination of the lists is measured."""

    cluster: Path | None = None
    """Cluster file, or lab or tiny; None: the preset's, or the devices here."""
    simulate: bool = False
    """Let CPU devices stand in for those of the cluster."""
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
    dtype: Literal["float32", "bfloat16"]
    """What is computed in; weights are kept in float32 in any case."""
    output: Path = Path("profile.json")
    """The profile; what is in the file already is kept and not measured again."""


def profile_config(preset: Preset) -> ProfileConfig:
    """Return what is measured of a preset unless somebody asks for something else.

    >>> from hetjax.training.presets import preset
    >>> profile_config(preset("llama-1b")).microbatch_sizes
    (1, 2, 4)
    """
    plan = None if preset.plan is None else read_plan(preset.plan)
    return ProfileConfig(
        simulate=preset.config.simulate,
        seq_len=preset.config.seq_len,
        microbatch_sizes=_sizes(preset, plan),
        tensor=_degrees(plan),
        remat=_remats(plan),
        dtype=preset.config.dtype,
    )


def check_output(config: ProfileConfig) -> None:
    """Raise BadInput if the profile cannot be written where it is to be."""
    folder = config.output.resolve().parent
    if not os.access(folder, os.W_OK) or len(config.output.name) > _MOST_LETTERS:
        raise BadInput(
            got=f"output file {str(config.output)!r}: cannot write in {str(folder)!r}",
            allowed="a file in a folder that is there and can be written",
            fix="give another --output, or make the folder",
        )


def _sizes(preset: Preset, plan: Plan | None) -> tuple[int, ...]:
    """1, 2, 4, and those of a data rank under the preset and the plan it brings."""
    planned = {
        replica.microbatch_size // stage.mesh.data
        for replica in (plan.replicas if plan else ())
        for stage in replica.stages
    }
    return tuple(sorted({1, 2, 4, preset.config.microbatch_size, *planned}))


def _degrees(plan: Plan | None) -> tuple[int, ...]:
    """1, and those of the plan."""
    stages = plan.stages() if plan else []
    return tuple(sorted({1, *(stage.mesh.tensor for _, _, stage in stages)}))


def _remats(plan: Plan | None) -> tuple[Remat, ...]:
    """None and full, and those of the plan."""
    stages = plan.stages() if plan else []
    usual: tuple[Remat, ...] = ("none", "full")
    return tuple(dict.fromkeys((*usual, *(stage.remat for _, _, stage in stages))))
