# SPDX-License-Identifier: Apache-2.0
"""Chooses the step to restore, and the sender of each slice to each worker.

Owns the decision: pure functions of what each place has and each worker needs. A place
is a worker's memory or disk, or the cloud, which belongs to no worker. Slices are named
by their leaves (`format.py`). Does not own sending them
(`runtime/control/recovery.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunId

Tier = Literal["memory", "disk", "cloud"]
Save = tuple[int, str]  # step and attempt: a step may be saved more than once
CLOUD = ""  # in place of a worker's name
_NEAREST = {"memory": 0, "disk": 1, "cloud": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialSnapshot:
    """The leaves of one save that one place has; `worker` is CLOUD for the cloud.

    `host` is the training loop's JSON of their manifests; it is empty for memory.
    `absent` names workers whose part of the save is missing there. `run` is the
    identity of the run that saved the leaves; memory always belongs to this run. If
    `is_trusted` is False, the save lacks the signature of this run's key: it is
    reported, but not read. `place` is the folder on a machine that does not see the
    run's directory.
    """

    worker: str
    tier: Tier
    save: Save
    leaves: frozenset[str]
    host: Mapping[str, Any] = field(default_factory=dict, compare=False)
    absent: frozenset[str] = frozenset()
    run: RunId = UNIDENTIFIED
    is_trusted: bool = True
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafSource:
    """Source of a leaf: the worker's own or a peer's memory or disk, or the cloud."""

    worker: str
    tier: Tier


Assignment = Mapping[str, Mapping[str, LeafSource]]  # by receiving worker, by leaf


def leaves_of(snapshots: Iterable[PartialSnapshot], save: Save) -> set[str]:
    """Return the leaves of a save that any place has."""
    return {leaf for h in snapshots if h.save == save for leaf in h.leaves}


def newest(
    snapshots: Iterable[PartialSnapshot],
    needed: AbstractSet[str],
    limit: Save | None = None,
) -> Save | None:
    """Return the newest save before `limit` that has every needed leaf, or None."""
    covered: dict[Save, set[str]] = {}
    for snapshot in snapshots:
        covered.setdefault(snapshot.save, set()).update(snapshot.leaves)
    whole = [save for save, leaves in covered.items() if needed <= leaves]
    below = [save for save in whole if limit is None or save < limit]
    return max(below, default=None)


def unasked(
    snapshots: Iterable[PartialSnapshot], asked: AbstractSet[str]
) -> dict[int, set[str]]:
    """Return, by step, the workers outside `asked` that may hold missing parts.

    A part is missing if it is absent from all snapshots of a save of that step.
    """
    absent: dict[Save, set[str]] = {}
    for snapshot in snapshots:
        absent.setdefault(snapshot.save, {*snapshot.absent}).intersection_update(
            snapshot.absent
        )
    left = {save[0]: lacking - asked for save, lacking in sorted(absent.items())}
    return {step: lacking for step, lacking in left.items() if lacking}


def assign(
    snapshots: Sequence[PartialSnapshot],
    save: Save,
    needs: Mapping[str, AbstractSet[str]],
    size_bytes: Mapping[str, int],
    excluded: AbstractSet[tuple[str, LeafSource]] = frozenset(),
) -> Assignment:
    """Assign each worker a source for each leaf that it needs of this save.

    The worker's own memory or disk comes first, then a peer's, then the cloud. Among
    peers, the one with the least to send so far comes first. `excluded` holds pairs of
    (leaf, source) that failed. Raises KeyError naming a leaf that has no source left.
    """
    places = sorted(
        (h for h in snapshots if h.save == save),
        key=lambda h: (_NEAREST[h.tier], h.worker),
    )
    by_leaf: dict[str, list[LeafSource]] = {}
    for snapshot in places:
        source = LeafSource(worker=snapshot.worker, tier=snapshot.tier)
        for leaf in snapshot.leaves:
            by_leaf.setdefault(leaf, []).append(source)
    load_bytes: dict[str, int] = {}
    found: dict[str, dict[str, LeafSource]] = {}
    for worker in sorted(needs):
        found[worker] = {}
        for leaf in sorted(needs[worker]):
            left = [s for s in by_leaf.get(leaf, ()) if (leaf, s) not in excluded]
            source = _nearest(left, worker, load_bytes)
            if source is None:
                raise KeyError(leaf)
            if source.worker not in (worker, CLOUD):
                sent = load_bytes.get(source.worker, 0) + size_bytes[leaf]
                load_bytes[source.worker] = sent
            found[worker][leaf] = source
    return found


def _nearest(
    sources: Sequence[LeafSource], worker: str, load_bytes: Mapping[str, int]
) -> LeafSource | None:
    """Return the worker itself as the source, else a peer, else the cloud."""

    def distance(source: LeafSource) -> tuple[int, int, int]:
        here = source.worker == worker
        far = 0 if here else 2 if source.tier == "cloud" else 1
        load = 0 if here else load_bytes.get(source.worker, 0)
        return far, load, _NEAREST[source.tier]

    return min(sources, key=distance, default=None)
