# SPDX-License-Identifier: Apache-2.0
"""The command line of `profile`: a preset's name, then what to measure of it.

Owns its options, its help and its errors. Does not own the measuring
(`profiling.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from hetjax.errors import BadInput
from hetjax.plans.files import read_plan
from hetjax.plans.plan import Plan, Remat
from hetjax.training.options import (
    Integers,
    Remats,
    parse_options,
    preset_first,
    preset_lines,
)
from hetjax.training.presets import PRESETS, Preset

_PROGRAM = "python -m hetjax.profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """What to measure; every combination of the lists is measured."""

    cluster: Path | None = None
    """Cluster file, or lab or tiny; None: the preset's, or the devices here."""
    simulate: bool = False
    """Let CPU devices stand in for those of the cluster."""
    seq_len: int
    """Tokens per sequence."""
    microbatch_sizes: Integers
    """Sequences per data rank; times between two sizes are interpolated."""
    tensor: Integers
    """Tensor-parallel degrees; those that a node is too small for are left out."""
    remat: Remats
    """What the backward pass computes again."""
    halves: bool = False
    """Measure the halves of backward passes too, for zero-bubble schedules."""
    dtype: Literal["float32", "bfloat16"]
    """What is computed in; weights are kept in float32 in any case."""
    output: Path = Path("profile.json")
    """The profile; what is in the file already is kept and not measured again."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the profile as one JSON object in place of the table."""


def parse(arguments: Sequence[str]) -> tuple[ProfileConfig, Preset]:
    """Return what to measure and the preset that it is measured of.

    BadInput for an unknown preset or option and for a value of the wrong type.
    SystemExit after help, which is printed.
    """
    if not arguments:
        raise BadInput(
            got="no preset to profile",
            allowed=f"{_PROGRAM} PRESET [options], with a preset of "
            f"{', '.join(PRESETS)}",
            fix=f"{_PROGRAM} tiny, say; {_PROGRAM} --help tells more",
        )
    if arguments[0] in ("-h", "--help"):
        print(profile_help())
        raise SystemExit(0)
    name, chosen, rest = preset_first(arguments, program=_PROGRAM)
    plan = None if chosen.plan is None else read_plan(chosen.plan)
    default = ProfileConfig(
        simulate=chosen.config.simulate,
        seq_len=chosen.config.seq_len,
        microbatch_sizes=_sizes(chosen, plan),
        tensor=_degrees(plan),
        remat=_remats(plan),
        dtype=chosen.config.dtype,
    )
    config = parse_options(
        default, rest, program=f"{_PROGRAM} {name}", description=chosen.summary
    )
    return config, chosen


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


def profile_help() -> str:
    """Return the text of `--help`: what is measured and why, and the presets."""
    return "\n".join(
        [
            f"usage: {_PROGRAM} PRESET [options]",
            "",
            "Time the layers of a preset's model on the devices that are here, and the",
            "links between them, and write a profile for `plan` and `simulate`.",
            "",
            "Only layers that differ are timed (embedding, one block of each kind,",
            "head), a layer at a time: a model that does not fit can be measured.",
            "The same command again measures what the file does not have yet.",
            "",
            "presets:",
            *preset_lines(),
            "",
            "examples:",
            f"  {_PROGRAM} tiny",
            f"  {_PROGRAM} llama-1b --microbatch-sizes 1,2,4 --tensor 1,2 \\",
            "      --remat none,full --output llama-1b.json",
            "",
            f"{_PROGRAM} PRESET --help lists the options and their values.",
            "Exit codes: 0 done, 1 failed, 2 bad input.",
        ]
    )
