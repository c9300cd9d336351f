# SPDX-License-Identifier: Apache-2.0
"""The frozen description of a run's layout: replicas of stages on device groups.

Owns the `Plan` tree, how it shows itself, and what follows from it alone (boundaries,
segments, sample ranges). Does not own its JSON (`plan_files.py`) nor the checks against
a cluster and a model (`validation.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from hetjax.cluster.catalogue import Precision
from hetjax.plans.table import aligned, html_table

Remat = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer"]
OffloadChoice = Literal["none", "optimizer", "auto"]  # auto: the planner's
AttentionForm = Literal["xla", "chunked", "cudnn", "splash"]
StageKey = tuple[int, int]  # (replica, stage)
LayerRange = tuple[int, int]  # half-open
Group = LayerRange | str  # of gradients: a segment, or the path of a tied parameter

_BEFORE = ("replica", "stage", "node", "devices", "data x tensor", "layers", "remat")
_CHOICES = ("precision", "attention", "offload")  # that a stage may leave out
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
    `precision` is what the stage computes in; None: what `precision.py` finds for its
    device. `attention` is the form of it; None: what `attention.py` finds. `offload`
    says what is on the stage's host in place of its devices: nothing, or masters and
    optimizer state, which are then updated there.
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

    `microbatch_size` counts sequences before the split over the `data` axis. One with
    no microbatches is idle: others have its samples (`rerouting.py`), but it still cuts
    segments, so that those who go on hold the same arrays.
    """

    num_microbatches: int
    microbatch_size: int
    stages: tuple[Stage, ...]

    @property
    def is_idle(self) -> bool:
        return self.num_microbatches == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the planner expects of the plan; at most limits of a run go by it."""

    step_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    tokens_per_s: float | None = None
    usd_per_million_tokens: float | None = None
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole layout; `model` is a preset name or the name of a user's model.

    `fingerprint` identifies the model's layers and shapes (`models/fingerprint.py`);
    None: a plan written by hand, which fits the model of its name.

    `programs` maps a node to action text that overrides the generator's. Where
    sequences are `packed`, each is of several documents that do not see each other.

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
        """Layers of the model: the embedding, the blocks, the head."""
        return self.replicas[0].stages[-1].layers[1]

    @property
    def nodes(self) -> frozenset[str]:
        """Names of the nodes that it has stages on."""
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
        """Forwards of a step: what simulating it takes goes with them."""
        return sum(r.num_microbatches * len(r.stages) for r in self.replicas)

    @property
    def title(self) -> str:
        """The whole plan in a line."""
        return (
            f"{self.model}: {self.global_batch} sequences of {self.seq_len} tokens per "
            f"step, schedule {self.schedule}"
        )

    def __str__(self) -> str:
        """The title, then an aligned row per stage."""
        return "\n".join([self.title, *aligned(self.columns, self.rows())]) + "\n"

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows(), title=self.title)

    @property
    def columns(self) -> tuple[str, ...]:
        """The header of `rows`; precision and attention where some stage says it."""
        return (*_BEFORE, *self._said, *_AFTER)

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row of text per stage, below `columns`."""
        return [
            _row(r, s, self.replicas[r], stage, self._said)
            for r, s, stage in self.stages()
        ]

    @property
    def _said(self) -> tuple[str, ...]:
        """The choices that some stage says itself."""
        stages = [stage for _, _, stage in self.stages()]
        return tuple(
            n for n in _CHOICES if any(getattr(s, n) not in _UNSAID for s in stages)
        )

    def used_devices(self) -> set[tuple[str, int]]:
        """The devices of all stages, by node and number."""
        return {(stage.node, d) for _, _, stage in self.stages() for d in stage.devices}

    def stages(self) -> list[tuple[int, int, Stage]]:
        """All stages as (replica index, stage index, stage), in order.

        Without those of replicas that are idle.
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
    """Maximal layer ranges that no replica's stage boundary cuts, ascending."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    cuts = {bound for stage in stages for bound in stage.layers}
    return list(pairwise(sorted(cuts)))


def segments_of(stage: Stage, of_plan: list[LayerRange]) -> list[LayerRange]:
    """The plan's segments that lie in the stage, ascending."""
    lo, hi = stage.layers
    return [segment for segment in of_plan if lo <= segment[0] and segment[1] <= hi]


def reduce_groups(
    plan: Plan, tied: Mapping[str, tuple[StageKey, ...]]
) -> dict[Group, tuple[StageKey, ...]]:
    """The holders of every gradient group with several, in the order of REDUCE.

    Highest layers come first, because their gradients are done first; a tied
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
    """Index of the replica's first sample in the global batch."""
    return sum(r.num_microbatches * r.microbatch_size for r in plan.replicas[:replica])
