# SPDX-License-Identifier: Apache-2.0
"""The frozen description of a run's layout: replicas of stages on device groups.

Owns the `Plan` tree, its display as text and HTML, and everything that follows from the
plan alone (boundaries, segments, sample ranges). Does not own its JSON
(`plan_files.py`) nor the checks against a cluster and a model (`validation.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from hetjax.cluster.catalogue import Precision
from hetjax.plans.table import aligned, html_table

Remat = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer"]
OffloadChoice = Literal["none", "optimizer", "auto"]  # auto: the planner decides
AttentionForm = Literal["xla", "chunked", "cudnn", "splash"]
StageKey = tuple[int, int]  # (replica, stage)
LayerRange = tuple[int, int]  # half-open
Group = LayerRange | str  # gradient group: a segment, or a tied parameter's path

_BEFORE = ("replica", "stage", "node", "devices", "data x tensor", "layers", "remat")
_CHOICES = ("precision", "attention", "offload")  # fields that a stage may leave out
_UNSAID = (None, "none")
_AFTER = ("launch-ahead", "microbatches")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMesh:
    """Sizes of the two mesh axes of a stage; their product is its device count."""

    data: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A contiguous layer range on some devices of one node.

    `devices` are indices into the node's devices, in mesh order (data-major).
    `launch_ahead` is the number of forwards that may be in flight (warm-up + 1).
    `precision` is what the stage computes in; None: `precision.py` chooses it for the
    device. `attention` is the attention form; None: `attention.py` chooses it.
    `offload` names what the stage keeps on its host instead of its devices: nothing, or
    master weights and optimizer state, which the host then also updates.
    """

    node: str
    devices: tuple[int, ...]
    mesh: StageMesh = StageMesh()
    layers: LayerRange
    remat: Remat = "none"
    launch_ahead: int
    precision: Precision | None = None
    attention: AttentionForm | None = None
    offload: Offload = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One pipeline that holds a whole model.

    `microbatch_size` counts sequences before the split over the `data` axis. A replica
    with no microbatches is idle: other replicas train on its samples (`rerouting.py`).
    It still cuts segments, so that the remaining replicas keep the same arrays.
    """

    num_microbatches: int
    microbatch_size: int
    stages: tuple[Stage, ...]

    @property
    def is_idle(self) -> bool:
        return self.num_microbatches == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The planner's predictions for the plan; a run derives only timeouts from them."""

    step_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    tokens_per_s: float | None = None
    usd_per_million_tokens: float | None = None
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole layout; `model` is a preset name or the name of a user's model.

    `fingerprint` identifies the model's layers and shapes (`models/fingerprint.py`).
    None means a plan written by hand, which fits the model with its name.

    `programs` maps a node to action text that overrides the generator's. If `packed`,
    each sequence holds several documents that do not attend to each other.

    >>> stage = Stage(node="a100-0", devices=(0,), layers=(0, 6), launch_ahead=1)
    >>> replica = Replica(num_microbatches=8, microbatch_size=4, stages=(stage,))
    >>> plan = Plan(model="tiny", seq_len=64, global_batch=32, replicas=(replica,))
    >>> print(plan.title)
    tiny: 32 sequences of 64 tokens per step, schedule 1f1b
    """

    model: str
    fingerprint: str | None = None
    seq_len: int
    global_batch: int
    schedule: str = "1f1b"
    packed: bool = False
    replicas: tuple[Replica, ...]
    programs: Mapping[str, str] = field(default_factory=dict, hash=False)
    predicted: Prediction | None = None

    @property
    def num_layers(self) -> int:
        """The model's number of layers: embedding, blocks and head."""
        return self.replicas[0].stages[-1].layers[1]

    @property
    def nodes(self) -> frozenset[str]:
        """Names of the nodes that have stages of the plan."""
        return frozenset(stage.node for _, _, stage in self.stages())

    @property
    def first_replica(self) -> int:
        """Index of the first replica that is not idle."""
        return next(r for r, replica in enumerate(self.replicas) if not replica.is_idle)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas train on in one step."""
        return self.global_batch * self.seq_len

    @property
    def num_forwards(self) -> int:
        """The number of forwards in a step; simulation time is proportional to it."""
        return sum(r.num_microbatches * len(r.stages) for r in self.replicas)

    @property
    def title(self) -> str:
        """A one-line summary of the plan."""
        return (
            f"{self.model}: {self.global_batch} sequences of {self.seq_len} tokens per "
            f"step, schedule {self.schedule}"
        )

    def __str__(self) -> str:
        """Return the title, then one aligned row per stage."""
        return "\n".join([self.title, *aligned(self.columns, self.rows())]) + "\n"

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows(), title=self.title)

    @property
    def columns(self) -> tuple[str, ...]:
        """The header of `rows`, with each of `_CHOICES` that some stage sets."""
        return (*_BEFORE, *self._said, *_AFTER)

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row of text per stage; `columns` is the header."""
        return [
            _row(r, s, self.replicas[r], stage, self._said)
            for r, s, stage in self.stages()
        ]

    @property
    def _said(self) -> tuple[str, ...]:
        """The fields of `_CHOICES` that some stage sets."""
        stages = [stage for _, _, stage in self.stages()]
        return tuple(
            n for n in _CHOICES if any(getattr(s, n) not in _UNSAID for s in stages)
        )

    def used_devices(self) -> set[tuple[str, int]]:
        """Return the devices of all stages as (node, index)."""
        return {(stage.node, d) for _, _, stage in self.stages() for d in stage.devices}

    def stages(self) -> list[tuple[int, int, Stage]]:
        """Return all stages as (replica index, stage index, stage), in order.

        Stages of idle replicas are left out.
        """
        return [
            (r, s, stage)
            for r, replica in enumerate(self.replicas)
            for s, stage in enumerate(replica.stages)
            if not replica.is_idle
        ]


def _row(
    r: int, s: int, replica: Replica, stage: Stage, said: tuple[str, ...]
) -> tuple[str, ...]:
    first, end = stage.layers
    return (
        str(r) if s == 0 else "",
        str(s),
        stage.node,
        ",".join(map(str, stage.devices)),
        f"{stage.mesh.data} x {stage.mesh.tensor}",
        f"{first}..{end - 1}",
        stage.remat,
        *(getattr(stage, name) or "" for name in said),
        str(stage.launch_ahead),
        f"{replica.num_microbatches} x {replica.microbatch_size}" if s == 0 else "",
    )


def segments(plan: Plan) -> list[LayerRange]:
    """Return the maximal layer ranges that no stage boundary cuts, ascending."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    cuts = {bound for stage in stages for bound in stage.layers}
    return list(pairwise(sorted(cuts)))


def segments_of(stage: Stage, of_plan: list[LayerRange]) -> list[LayerRange]:
    """Return the plan's segments that lie in the stage, ascending."""
    lo, hi = stage.layers
    return [segment for segment in of_plan if lo <= segment[0] and segment[1] <= hi]


def reduce_groups(
    plan: Plan, tied: Mapping[str, tuple[StageKey, ...]]
) -> dict[Group, tuple[StageKey, ...]]:
    """Return the holders of each gradient group with several, in REDUCE order.

    Highest layers come first, because their gradients are complete first. A tied
    parameter's gradients come from both ends of the pipeline, so it comes last. `tied`
    gives the holders of each tied parameter by path.
    """
    stages = [(r, s, stage.layers) for r, s, stage in plan.stages()]
    keys = {(r, s) for r, s, _ in stages}
    groups: dict[Group, tuple[StageKey, ...]] = {}
    for lo, hi in reversed(segments(plan)):
        groups[lo, hi] = tuple(
            (r, s) for r, s, layers in stages if layers[0] <= lo and hi <= layers[1]
        )
    for path in sorted(tied):
        assert keys.issuperset(tied[path]), f"{path} is held outside the plan"
        groups[path] = tuple(sorted(set(tied[path])))
    return {group: holders for group, holders in groups.items() if len(holders) > 1}


def first_sample(plan: Plan, replica: int) -> int:
    """Return the index of the replica's first sample in the global batch."""
    return sum(r.num_microbatches * r.microbatch_size for r in plan.replicas[:replica])
