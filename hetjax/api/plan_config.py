# SPDX-License-Identifier: Apache-2.0
"""What a search is told besides model and cluster: one frozen set of choices.

Owns the choices, their help texts (shown by `plan --help`) and those that a preset
makes. Does not own what they mean together (`planning.py`).
"""

from dataclasses import dataclass
from typing import Literal, get_args

from hetjax.planner.model.objectives import Objective, Wish
from hetjax.plans.plan import Remat
from hetjax.training.presets import Preset

_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What is planned for, what may be chosen, and what is asked besides."""

    global_batch: int | None = None
    """Sequences per step, over all replicas."""
    seq_len: int | None = None
    """Tokens per sequence."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What is computed in; else the profile's, the preset's, or bfloat16."""
    objective: Wish = "time"
    """What is to be best: step time, USD per million tokens (cost), or progress while
    spot nodes vanish (goodput)."""
    max_usd_per_hour: float | None = None
    """The nodes in use may not cost more than this; each is rented whole."""
    deadline_hours: float | None = None
    """The plan has to get through --tokens in this time."""
    tokens: float | None = None
    """How many tokens --deadline-hours is for, as in 300e9."""
    recovery_s: float = Objective().recovery_s
    """Of goodput: from a lost node to the next step."""
    checkpoint_every_s: float = Objective().checkpoint_every_s
    """Of goodput: from checkpoint to checkpoint, half of which is lost with a node that
    alone held some layer."""
    node_back_s: float = Objective().node_back_s
    """Of goodput: from a lost node until it is back, or another in its place."""
    microbatch_sizes: tuple[int, ...] = _SIZES
    """Sequences per microbatch that are tried, before the split over data."""
    tensor: tuple[int, ...] = _SIZES
    """Tensor-parallel degrees that are tried, where model and nodes allow them."""
    remat: tuple[Remat, ...] = get_args(Remat)
    """What backward passes may compute again."""
    unequal_tensor: bool = False
    """Let every stage have a tensor degree of its own."""
    compare: tuple[str, ...] | None = None
    """Planners to compare with: names, or `none`; all where there are up to 64
    devices, or if no name follows."""
    pareto: bool = False
    """Show the best plans by time, by cost and by goodput."""
    what_if: bool = False
    """Show what a node more of each kind brings, and what one fewer costs."""
    search_s: float | None = None
    """End with the best found by then, all that is asked included; otherwise where the
    search has nothing more to try, local search after 5 s. Ctrl-C ends it at any time,
    with the best so far."""
    horizon_s: float = 3600.0
    """Of --from: the time in which a move has to pay."""


def plan_config(preset: Preset | None) -> PlanConfig:
    """Return what is planned unless somebody asks for something else.

    >>> from hetjax.training.presets import preset
    >>> plan_config(preset("tiny")).global_batch
    48
    """
    if preset is None:
        return PlanConfig()
    config = preset.config
    return PlanConfig(
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        microbatch_sizes=tuple(sorted({*_SIZES, config.microbatch_size})),
    )
