# SPDX-License-Identifier: Apache-2.0
"""Defines the costs of a plan: times, bytes and routes, as plain numbers.

Owns the data that the schedules and the simulator work with. Does not own its source
(analytic model, measured profile), which other files of this room choose. Needs no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetjax.plans.plan import Group, StageKey


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds that one stage's devices are busy with each action.

    `fused_s` is forward and backward of the last stage in one program, the loss
    included. `input_gradient_s` and `weight_gradient_s` are the halves I and W of a
    split backward; None if the caller did not request them.
    """

    forward_s: float
    backward_s: float
    fused_s: float
    input_gradient_s: float | None = None
    weight_gradient_s: float | None = None
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one stage on each of its devices.

    `static_bytes` live through the whole step: weights and their compute copies,
    optimizer state, gradient accumulators. `saved_bytes` is what one microbatch keeps
    from F to B: the stage's input and the residuals. `half_saved_bytes` is what it
    keeps from I to W. `input_bytes` and `output_bytes` are one microbatch's activation
    on each side, equal to the bytes of its gradient. `workspace_bytes` is the most that
    any program of the stage needs while it runs. `update_bytes` is the workspace of the
    update, which runs when no microbatch is in flight.
    """

    static_bytes: int = 0
    saved_bytes: int = 0
    half_saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The route of messages from one stage to another, or of a ring's hop.

    `trunks` names the capacities that the route uses (see `Costs.trunks`): each
    direction of a link is one. A message holds its trunks for bytes / bandwidth,
    and arrives `latency_s` later.
    """

    trunks: tuple[str, ...]
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """One group's gradient sum: the bytes that all its holders send over each trunk.

    The sum is complete `latency_s` after the last of these bytes.
    """

    trunk_bytes: Mapping[str, float]
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """All that the simulator needs to know about a plan besides its programs.

    `trunks` gives bytes per second by trunk. `routes` and `message_bytes` are keyed by
    (from stage, to stage). `memory_bytes` is the memory of one device of the stage.
    For stages in `compiled`, the compiler reported the workspace. `devices` names the
    stages' kinds of device, if they are known.
    """

    times: Mapping[StageKey, StageTimes]
    trunks: Mapping[str, float] = field(default_factory=dict)
    routes: Mapping[tuple[StageKey, StageKey], Route] = field(default_factory=dict)
    message_bytes: Mapping[tuple[StageKey, StageKey], float] = field(
        default_factory=dict
    )
    reductions: Mapping[Group, Reduction] = field(default_factory=dict)
    memory: Mapping[StageKey, StageMemory] = field(default_factory=dict)
    memory_bytes: Mapping[StageKey, float] = field(default_factory=dict)
    compiled: frozenset[StageKey] = frozenset()
    devices: Mapping[StageKey, str] = field(default_factory=dict)
    norm_s: float = 0.0
