# SPDX-License-Identifier: Apache-2.0
"""What is measured of a preset's model unless somebody asks for something else.

Does not own the choices that there are (`hetjax/profiling/config.py`).
"""

from hetjax.plans.files import read_plan
from hetjax.plans.plan import Plan, Remat
from hetjax.profiling.config import ProfileConfig
from hetjax.training.presets import Preset


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
