# SPDX-License-Identifier: Apache-2.0
"""The settings of a search besides model and cluster: one frozen set of choices.

Owns the choices, their help texts (shown by `plan --help`) and those that a preset
makes. Does not own what they mean together (`planning.py`, `plan_objective.py`).
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from hetjax.costs.network.wire_bytes import GradientWire
from hetjax.models.finetuning import LoraConfig, TrainConfig
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.plans.attention import Attention
from hetjax.plans.plan import OffloadChoice, Remat
from hetjax.plans.precision import Dtype
from hetjax.training.settings.presets import Preset

_SIZES = (1, 2, 4, 8)
_USUAL = OptimizerConfig()


@dataclass(frozen=True, kw_only=True)
class PlannedOptimizer:
    """The settings of the optimizer that decide how much memory its state takes."""

    name: str = _USUAL.name
    """The rule: adamw, adafactor, lion, muon, schedule-free or sgd."""
    state_bits: Literal[32, 8] = _USUAL.state_bits
    """Bits of each moment in the state of adamw, lion and sgd."""
    ema: float = _USUAL.ema
    """Decay of a moving average of the weights, which takes memory; 0: no average."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for, what the search may choose, and which questions to answer."""

    global_batch: int | None = None
    """Sequences per step, over all replicas; None: the preset's."""
    seq_len: int | None = None
    """Tokens per sequence; None: the preset's."""
    dtype: Dtype | None = None
    """Precision of computation; best: the best that each kind of device has. None: that
    of the profile or the preset, otherwise best."""
    attention: Attention | None = None
    """How to compute attention; best: with each kind's own kernel, if it has one. None:
    as in the preset, otherwise best."""
    objective: Wish = "time"
    """What to optimise. time: the step time; cost: USD per million tokens; goodput:
    the expected progress while spot nodes vanish."""
    max_usd_per_hour: float | None = None
    """Limit on the total price of the nodes in use; each is rented whole."""
    usd_per_kwh: float | None = None
    """Price of electricity. A node without a price, or with a price of 0, then costs
    the electricity of its devices."""
    deadline_hours: float | None = None
    """Hours in which the plan has to process --tokens."""
    tokens: float | None = None
    """Tokens of the whole run, 300e9 for instance: plan says how long they take, and
    --deadline-hours refers to them."""
    recovery_s: float = Objective().recovery_s
    """For goodput: seconds from the loss of a node to the next step."""
    checkpoint_every_s: float = Objective().checkpoint_every_s
    """For goodput: seconds between checkpoints. If a lost node alone held some layer,
    half of this time is lost on average."""
    node_back_s: float = Objective().node_back_s
    """For goodput: seconds from the loss of a node until it, or another, is back."""
    microbatch_sizes: tuple[int, ...] = _SIZES
    """Sequences per microbatch to try, before the split over data."""
    tensor: tuple[int, ...] = _SIZES
    """Tensor-parallel degrees to try, if model and nodes allow them."""
    remat: tuple[Remat, ...] = get_args(Remat)
    """What backward passes may recompute to save memory."""
    offload: OffloadChoice = "none"
    """Where to keep float32 weights and optimizer state. none: on the devices;
    optimizer: on the hosts, which then run the update; auto: whichever is best for each
    stage."""
    unequal_tensor: bool = False
    """Allow stages with different tensor-parallel degrees."""
    compare: tuple[str, ...] | None = None
    """Planners to compare with: names, or `none`. By default all, on up to 64 devices;
    without a name, all on any number of devices."""
    pareto: bool = False
    """Show the best plans by time, by cost and by goodput."""
    what_if: bool = False
    """Show what one more node of each kind gains, and what one fewer costs."""
    search_s: float | None = None
    """Seconds for the search, which then ends with the best plan so far. None: search
    until there is nothing more to try, with about 5 s of local search. Ctrl-C ends the
    search at any time, with the best plan so far."""
    search_work: tuple[int, ...] | None = None
    """Amount of work instead of seconds, as a search with --search-s prints it: the
    same request then gets the same plan, on any machine. One number: the total work."""
    gradient_wire: GradientWire = "float32"
    """Precision of gradients between workers; bfloat16 halves the bytes but rounds."""
    horizon_s: float = 3600.0
    """With --from: seconds within which a move has to pay off."""
    optimizer: PlannedOptimizer = field(default_factory=PlannedOptimizer)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


def plan_config(preset: Preset | None) -> PlanConfig:
    """Return the choices of a preset, or the defaults without one.

    >>> from hetjax.training.settings.presets import preset
    >>> plan_config(preset("tiny")).global_batch
    48
    """
    if preset is None:
        return PlanConfig()
    config, rule = preset.config, preset.config.optimizer
    return PlanConfig(
        optimizer=PlannedOptimizer(
            name=rule.name, state_bits=rule.state_bits, ema=rule.ema
        ),
        global_batch=config.global_batch,
        seq_len=config.seq_len,
        microbatch_sizes=tuple(sorted({*_SIZES, config.microbatch_size})),
        train=config.train,
        lora=config.lora,
        offload=config.offload,
    )
