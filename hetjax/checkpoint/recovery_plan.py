# SPDX-License-Identifier: Apache-2.0
"""Which step can be restored from what is left, and who gives which slice to whom.

Owns the choice: pure functions of what each place holds and each worker needs. A place
is a worker's memory, its disk, or the cloud, which no worker owns. Slices go by the
names of leaves (`layout.py`). Does not own how they travel (`runtime/recovery.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

Tier = Literal["memory", "disk", "cloud"]
Save = tuple[int, str]  # step, and the attempt where it was saved more than once
CLOUD = ""  # the worker of what no worker holds
_NEAREST = {"memory": 0, "disk": 1, "cloud": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Leaves of one save in one place; `worker` is CLOUD for the cloud.

    `host` is what their manifests say besides: nothing for memory.
    """

    worker: str
    tier: Tier
    save: Save
    leaves: frozenset[str]
    host: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a worker gets a leaf: its own or another's memory or disk, or the cloud."""

    worker: str
    tier: Tier


Assignment = Mapping[str, Mapping[str, Source]]  # by worker that needs, by leaf


def leaves_of(holdings: Iterable[Holding], save: Save) -> set[str]:
    """All that is somewhere of a save."""
    return {leaf for h in holdings if h.save == save for leaf in h.leaves}


def newest(
    holdings: Iterable[Holding], needed: AbstractSet[str], limit: Save | None = None
) -> Save | None:
    """Return the newest save, below `limit`, of which all that is needed is somewhere.

    None if there is none.
    """
    covered: dict[Save, set[str]] = {}
    for holding in holdings:
        covered.setdefault(holding.save, set()).update(holding.leaves)
    whole = [save for save, leaves in covered.items() if needed <= leaves]
    below = [save for save in whole if limit is None or save < limit]
    return max(below, default=None)


def assign(
    holdings: Sequence[Holding],
    save: Save,
    needs: Mapping[str, AbstractSet[str]],
    size_bytes: Mapping[str, int],
    excluded: AbstractSet[tuple[str, Source]] = frozenset(),
) -> Assignment:
    """Give each worker a source of each leaf that it needs of this save.

    Its own memory or disk comes first, then another's, then the cloud; among others the
    one that has least to send so far. `excluded` are (leaf, source) that have failed.
    KeyError naming a leaf that no place is left for.
    """
    places = sorted(
        (h for h in holdings if h.save == save),
        key=lambda h: (_NEAREST[h.tier], h.worker),
    )
    by_leaf: dict[str, list[Source]] = {}
    for holding in places:
        source = Source(worker=holding.worker, tier=holding.tier)
        for leaf in holding.leaves:
            by_leaf.setdefault(leaf, []).append(source)
    load_bytes: dict[str, int] = {}
    found: dict[str, dict[str, Source]] = {}
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
    sources: Sequence[Source], worker: str, load_bytes: Mapping[str, int]
) -> Source | None:
    """What is here, then a peer's memory or disk, the cloud last."""

    def distance(source: Source) -> tuple[int, int, int]:
        here = source.worker == worker
        far = 0 if here else 2 if source.tier == "cloud" else 1
        load = 0 if here else load_bytes.get(source.worker, 0)
        return far, load, _NEAREST[source.tier]

    return min(sources, key=distance, default=None)
