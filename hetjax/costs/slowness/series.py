# SPDX-License-Identifier: Apache-2.0
"""Converts step times to series in which only slow parts stand out.

A part's time in a step varies with the batch, with the devices' environment, and by
chance. The common change of a replica's stages is subtracted from each of them: it is
the lower median over nodes of each node's lower median. So one slow node does not shift
it while another node is as before. The same applies between replicas. The common
changes form separate series. Owns the order of series and this arithmetic. Does not own
the detection of changes (`sequential.py`) nor their meaning (`detector.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetjax.costs.slowness.findings import (
    Subject,
    link_subject,
    replica_subject,
    run_subject,
)
from hetjax.costs.slowness.sequential import Floats
from hetjax.costs.slowness.step_times import Ends, Lanes, Part, StepTimes
from hetjax.plans.plan import StageKey

_LEAST_SHARE = 0.05  # of a lane's time, for a part to be watched


@dataclass(frozen=True)
class WatchedParts:
    """P parts of U lanes, R replicas, the run and E links: K series, in this order.

    A replica with one lane, or without other replicas, has no separate series.
    """

    lanes: Lanes
    parts: tuple[Part, ...]
    ends: tuple[Ends, ...]
    share_of: dict[Part, float]  # of its lane's time

    @cached_property
    def keys(self) -> list[StageKey]:
        """The lanes that have parts."""
        having = {part[:2] for part in self.parts}
        return [lane.key for lane in self.lanes.lanes if lane.key in having]

    @cached_property
    def lane_P(self) -> np.ndarray:
        """The lane of each part, among the keys."""
        return np.array([self.keys.index(part[:2]) for part in self.parts])

    @cached_property
    def replicas(self) -> dict[int, dict[str, list[int]]]:
        """For each replica, its lanes by node."""
        found: dict[int, dict[str, list[int]]] = {}
        for u, key in enumerate(self.keys):
            node = self.lanes.by_key[key].node
            found.setdefault(key[0], {}).setdefault(node, []).append(u)
        return found

    @cached_property
    def pipelines(self) -> list[int]:
        """The positions of the replicas that have a series."""
        sizes = [sum(map(len, nodes.values())) for nodes in self.replicas.values()]
        return [r for r, size in enumerate(sizes) if size > 1 and len(sizes) > 1]

    @property
    def run_at(self) -> int:
        return len(self.parts) + len(self.pipelines)

    @property
    def num_series(self) -> int:
        return self.run_at + 1 + len(self.ends)

    def subject_at(self, at: int) -> Subject:
        """Return the subject of a series that belongs to no part."""
        if at == self.run_at:
            return run_subject(self.lanes)
        if at > self.run_at:
            return link_subject(self.ends[at - self.run_at - 1])
        replica = [*self.replicas][self.pipelines[at - len(self.parts)]]
        name = f"batches of replica {replica}"
        return replica_subject(self.lanes, self.lanes.of_replica(replica), name)

    def has(self, times: StepTimes) -> bool:
        """Return whether a step has all parts."""
        return all(times.parts.get(part, 0.0) > 0 for part in self.parts)


def watched(lanes: Lanes, steps: Sequence[StepTimes]) -> WatchedParts:
    """Return the parts and links of all these steps, without very short parts."""
    in_all = set.intersection(*({*times.parts} for times in steps))
    ends = set.intersection(*({*times.links} for times in steps))
    mean_s = {
        part: float(np.mean([times.parts[part] for times in steps]))
        for part in sorted(in_all)
        if part[:2] in lanes.by_key and min(t.parts[part] for t in steps) > 0
    }
    lane_s: dict[StageKey, float] = {}
    for part, seconds in mean_s.items():
        lane_s[part[:2]] = lane_s.get(part[:2], 0.0) + seconds
    share_of = {part: s / lane_s[part[:2]] for part, s in mean_s.items()}
    parts = tuple(part for part in mean_s if share_of[part] >= _LEAST_SHARE)
    return WatchedParts(lanes, parts, tuple(sorted(ends)), share_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    """Logarithms of the seconds of N steps: by part, lane and link."""

    parts_NP: Floats
    lanes_NU: Floats
    links_NE: Floats

    def medians(self) -> "Logs":
        """Return the medians over steps, as the times of one step."""
        return Logs(
            parts_NP=np.median(self.parts_NP, axis=0, keepdims=True),
            lanes_NU=np.median(self.lanes_NU, axis=0, keepdims=True),
            links_NE=np.median(self.links_NE, axis=0, keepdims=True),
        )


def logs(steps: Sequence[StepTimes], what: WatchedParts) -> Logs:
    """Return the logarithms of these steps' times; an unused link is NaN."""
    parts_NP = np.log([[times.parts[part] for part in what.parts] for times in steps])
    links = [[times.links.get(ends, np.nan) for ends in what.ends] for times in steps]
    links_NE = np.log(np.array(links).reshape(len(steps), len(what.ends)))
    lanes_NU = _of_lanes(parts_NP, what)
    return Logs(parts_NP=parts_NP, lanes_NU=lanes_NU, links_NE=links_NE)


def _of_lanes(parts_NP: Floats, what: WatchedParts) -> Floats:
    lanes_NU = np.full((len(parts_NP), len(what.keys)), -np.inf)
    for p, u in enumerate(what.lane_P):
        lanes_NU[:, u] = np.logaddexp(lanes_NU[:, u], parts_NP[:, p])
    return lanes_NU


def without(found: Logs, level_P: Floats, what: WatchedParts) -> Logs:
    """Return `found` as if its parts were not slow by these levels."""
    parts_NP = found.parts_NP - level_P
    faster_NU = _of_lanes(found.parts_NP, what) - _of_lanes(parts_NP, what)
    return replace(found, parts_NP=parts_NP, lanes_NU=found.lanes_NU - faster_NU)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Logarithms of the ratios of N steps' times to the usual times.

    `own_NK` is as measured, `apart_NK` without the common change.
    """

    own_NK: Floats
    apart_NK: Floats


def series(found: Logs, usual: Logs, what: WatchedParts) -> Series:
    """Return the differences between steps and the usual times."""
    own_NU = found.lanes_NU - usual.lanes_NU
    own_NP = found.parts_NP - usual.parts_NP
    replica_NR = np.stack(
        [
            lower_middle([lower_middle(own_NU[:, lanes].T) for lanes in nodes.values()])
            for nodes in what.replicas.values()
        ],
        axis=1,
    )
    run_N1 = lower_middle(replica_NR.T)[:, None]
    common_NU = np.empty_like(own_NU)
    for r, nodes in enumerate(what.replicas.values()):
        lanes = [u for on_node in nodes.values() for u in on_node]
        alone = len(lanes) == 1 and len(what.replicas) > 1
        common_NU[:, lanes] = run_N1 if alone else replica_NR[:, r : r + 1]
    links_NE = found.links_NE - usual.links_NE
    of_pipelines_NR = replica_NR[:, what.pipelines]
    return Series(
        own_NK=np.hstack([own_NP, of_pipelines_NR, run_N1, links_NE]),
        apart_NK=np.hstack(
            [
                own_NP - common_NU[:, what.lane_P],
                of_pipelines_NR - run_N1,
                run_N1,
                links_NE,
            ]
        ),
    )


def medians(rows_NK: Floats) -> Floats:
    """Return medians of finite values; a link is not used in every step."""
    found_K = np.median(rows_NK, axis=0)
    for at in np.flatnonzero(np.isnan(found_K)):
        there = rows_NK[np.isfinite(rows_NK[:, at]), at]
        found_K[at] = np.median(there) if len(there) else 0.0
    return found_K


def lower_middle(values_XN: Sequence[Floats] | Floats) -> Floats:
    """Return the median over X; for an even number, the lower of the middle two."""
    sorted_XN = np.sort(np.asarray(values_XN), axis=0)
    return sorted_XN[(len(sorted_XN) - 1) // 2]
