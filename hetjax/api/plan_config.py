# SPDX-License-Identifier: Apache-2.0
"""What a search is given besides model and cluster: one frozen set of choices.

Owns the choices, their help texts (shown by `plan --help`) and those that a preset
makes. Does not own what they mean together (`planning.py`, `plan_objective.py`).
"""

from dataclasses import dataclass, field
from typing import get_args

from hetjax.costs.network.wire_bytes import GradientWire
from hetjax.models.finetuning import LoraConfig, TrainConfig
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.plans.attention import Attention
from hetjax.plans.plan import OffloadChoice, Remat
from hetjax.plans.precision import Dtype
from hetjax.training.settings.presets import Preset

_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What is planned for, what may be chosen, and what is asked besides."""

    global_batch: int | None = None
    """Sequences per step, over all replicas; None: the preset's."""
    seq_len: int | None = None
    """Tokens per sequence; None: the preset's."""
    dtype: Dtype | None = None
    """Precision of computation; best: what every kind of device does best. None: the
    profile's, the preset's, or best."""
    attention: Attention | None = None
    """How attention is computed; best: by each kind's own kernel, if it has one. None:
    the preset's, or best."""
    objective: Wish = "time"
    """What to optimise: step time, USD per million tokens (cost), or progress while
    spot nodes vanish (goodput)."""
    max_usd_per_hour: float | None = None
    """The nodes in use may not cost more than this; each is rented whole."""
    usd_per_kwh: float | None = None
    """What electricity costs: nodes without a price, or with one of 0, then cost that
    of their devices."""
    deadline_hours: float | None = None
    """The plan has to get through --tokens in this time."""
    tokens: float | None = None
    """Tokens of the whole run, as in 300e9: plan says how long they take, and
    --deadline-hours is for them."""
    recovery_s: float = Objective().recovery_s
    """For goodput: from the loss of a node to the next step."""
    checkpoint_every_s: float = Objective().checkpoint_every_s
    """For goodput: from checkpoint to checkpoint; on average half of it is lost with a
    node that alone held some layer."""
    node_back_s: float = Objective().node_back_s
    """For goodput: from the loss of a node until it, or another, is in its place."""
    microbatch_sizes: tuple[int, ...] = _SIZES
    """Sequences per microbatch to try, before the split over data."""
    tensor: tuple[int, ...] = _SIZES
    """Tensor-parallel degrees to try, where model and nodes allow them."""
    remat: tuple[Remat, ...] = get_args(Remat)
    """What backward passes may compute again to save memory."""
    offload: OffloadChoice = "none"
    """Where masters and optimizer state are: on the devices (none), on the hosts, which
    then update them (optimizer), or either, stage by stage (auto)."""
    unequal_tensor: bool = False
    """Let every stage have a tensor degree of its own."""
    compare: tuple[str, ...] | None = None
    """Planners to compare with: names, or `none`. By default all, on up to 64 devices;
    if no name follows, all in any case."""
    pareto: bool = False
    """Show the best plans by time, by cost and by goodput."""
    what_if: bool = False
    """Show what one more node of each kind brings, and what one fewer costs."""
    search_s: float | None = None
    """Seconds for all that is asked; then the best plan so far counts. None: until
    there is nothing more to try, but so much local search as takes about 5 s. Ctrl-C
    ends the search at any time, with the best so far."""
    search_work: tuple[int, ...] | None = None
    """Work in place of seconds, as a search with --search-s prints it: the same request
    then gets that search's plan again, on any machine. One number: its end."""
    gradient_wire: GradientWire = "float32"
    """Precision of gradients between workers, as of train."""
    horizon_s: float = 3600.0
    """With --from: the time within which a move has to pay off."""
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


def plan_config(preset: Preset | None) -> PlanConfig:
    """Return what is planned unless somebody asks for something else.

    >>> from hetjax.training.settings.presets import preset
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
        train=config.train,
        lora=config.lora,
        offload=config.offload,
    )
