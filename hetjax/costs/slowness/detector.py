# SPDX-License-Identifier: Apache-2.0
"""Detects devices, stages, links and batches that became slow or differ from peers.

Each series (`series.py`) is compared with its own reference, the first steps of a plan.
An alarm of the sequential test is reported as the fewest names that explain it, with
their factor and first slow step. Stages with equal work are compared once, as soon as
there is a reference. Slow subjects are watched for recovery and more slowdown. A series
faster than ever before only moves its reference. Owns references and the meaning of
alarms. Does not own the test (`sequential.py`) nor the words (`findings.py`).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetjax.costs.slowness.findings import Slowdown, Subject, subjects_of
from hetjax.costs.slowness.peers import behind_peers
from hetjax.costs.slowness.sequential import SHIFT, Cusum, Floats, Reference, reference
from hetjax.costs.slowness.series import (
    Logs,
    Series,
    WatchedParts,
    logs,
    medians,
    series,
    watched,
    without,
)
from hetjax.costs.slowness.step_times import Ends, Lanes, Part, StepTimes

Bools = NDArray[np.bool_]

NUM_COLD = 2  # steps that compile or fill caches
NUM_FIRST, NUM_MOST = 16, 64  # steps of the reference
NOTICEABLE = math.log(1.12)  # about half of `SHIFT`: smaller changes do not count
_EVERY = 8  # steps between updates of the reference
_KEPT = 64  # steps on which a drift is measured
_EVIDENCE = {
    "run": "all equally: the cause is their batches, or something they share",
    "batches": "all its stages equally, other replicas as before",
}


@dataclass(slots=True)
class _Slow:
    """A present slowdown, and the series that show it."""

    finding: Slowdown
    tests: list[int]


class Detector:
    """Watches the steps of one plan after another: `begin`, then `add` each step."""

    def __init__(self) -> None:
        self._one_plan: _OnePlan | None = None

    def begin(self, lanes: Lanes) -> None:
        """Watch the steps of a plan; slow nodes count as slow until they recover."""
        self._one_plan = _OnePlan(lanes, dict(self.slow_nodes))

    def add(self, times: StepTimes) -> list[Slowdown]:
        """Add a step; return the new findings."""
        return [] if self._one_plan is None else self._one_plan.add(times)

    @property
    def lanes(self) -> Lanes | None:
        """The lanes of the watched plan."""
        return self._one_plan and self._one_plan.lanes

    def leave_out_some(self) -> None:
        """Ignore the next `NUM_COLD` steps, which are unlike others."""
        if self._one_plan is not None:
            self._one_plan.num_cold = 0

    @property
    def slow_nodes(self) -> Mapping[str, float]:
        """The slowdown factors of slow nodes, for the next plan.

        A node is as slow as the slowest of its devices.
        """
        return {} if self._one_plan is None else self._one_plan.slow_nodes

    @property
    def slow_links(self) -> Mapping[Ends, float]:
        """The slowdown factors of links, by the workers at their ends."""
        return {} if self._one_plan is None else self._one_plan.slow_links


class _OnePlan:
    """The steps of one plan; the nodes in `counted` count as slow."""

    def __init__(self, lanes: Lanes, counted: Mapping[str, float]) -> None:
        self.lanes, self._counted = lanes, dict(counted)
        self.num_cold = 0  # steps so far that do not count
        self._reference: list[StepTimes] = []
        self._watch: _Watch | None = None

    @property
    def slow_nodes(self) -> Mapping[str, float]:
        return self._counted if self._watch is None else self._watch.slow_nodes

    @property
    def slow_links(self) -> Mapping[Ends, float]:
        return {} if self._watch is None else self._watch.slow_links

    def add(self, times: StepTimes) -> list[Slowdown]:
        if self.num_cold < NUM_COLD:
            self.num_cold += 1
            return []
        if self._watch is not None:
            return self._watch.add(times)
        self._reference.append(times)
        if len(self._reference) < NUM_FIRST:
            return []
        what = watched(self.lanes, self._reference)
        if not what.parts:  # a worker that reported nothing: try later steps
            self._reference = []
            return []
        self._watch = _Watch(what, self._reference)
        self._watch.count(self._counted)
        return self._watch.unlike_peers(times.step, known=self._counted)


class _Watch:
    """Watches series with a reference, from the reference's last step on."""

    def __init__(self, what: WatchedParts, steps: list[StepTimes]) -> None:
        self._what, self._steps = what, steps
        self._slow: dict[Subject, _Slow] = {}
        self._recent: deque[tuple[int, Series]] = deque(maxlen=_KEPT)
        self._up, self._down = Cusum(what.num_series), Cusum(what.num_series)
        self._level_K = np.zeros(what.num_series)  # 0: as in the reference
        self._moved_K = np.zeros(what.num_series)  # shift of the reference so far
        self._learn()

    def _learn(self) -> None:
        """Compute the usual times and the reference (again)."""
        found = logs(self._steps, self._what)
        self._usual: Logs = found.medians()
        before = series(found, self._usual, self._what)
        self._before: Reference = reference(before.apart_NK)

    @property
    def slow_nodes(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for subject, slow in self._slow.items():
            if subject.node is not None:
                factor = max(self._factor_by_now(slow), found.get(subject.node, 1.0))
                found[subject.node] = factor
        return found

    @property
    def slow_links(self) -> Mapping[Ends, float]:
        every = self._slow.items()
        return {s.ends: self._factor_by_now(x) for s, x in every if s.ends is not None}

    def _factor_by_now(self, slow: _Slow) -> float:
        """Return the factor over all steps since, also those after the finding."""
        if not self._recent:
            return slow.finding.factor
        shift_K, _ = self._since(max(slow.finding.since, self._recent[0][0]))
        return self._factor(slow.tests, shift_K)

    def add(self, times: StepTimes) -> list[Slowdown]:
        if not self._what.has(times):
            return []  # the step was not or only partly reported
        now = series(logs([times], self._what), self._usual, self._what)
        self._recent.append((times.step, now))
        rise_K = now.apart_NK[0] - self._center_K - self._level_K
        up_K = self._up.add(times.step, rise_K, self._before, SHIFT)
        fall_K = np.where(self._level_K > 0, self._level_K, SHIFT)
        down_K = self._down.add(times.step, -rise_K, self._before, fall_K)
        found = self._fallen(times.step, down_K) + self._risen(times.step, up_K)
        if not (self._level_K.any() or self._moved_K.any()):
            self._refine(times)
        return found

    @property
    def _center_K(self) -> Floats:
        return self._before.center_K + self._moved_K

    def _refine(self, times: StepTimes) -> None:
        """Add an ordinary step to the steps of the reference."""
        most = max(self._up.sum_K.max(), self._down.sum_K.max())
        if len(self._steps) < NUM_MOST and most < self._up.limit / 3:
            self._steps.append(times)
            if len(self._steps) % _EVERY == 0:
                self._learn()

    def count(self, known: Mapping[str, float]) -> None:
        """Count known slow nodes as slow, in the reference, too."""
        level_of = {
            part: math.log(known[node])
            for part in self._what.parts
            if (node := self._what.lanes.by_key[part[:2]].node) in known
        }
        self._take_as_slow(level_of, self._steps[0].step, "as under the previous plan")

    def unlike_peers(self, step: int, known: Iterable[str]) -> list[Slowdown]:
        """Return findings for stages that are slower than others with equal work."""
        level_of = {
            part: level
            for key, level in behind_peers(self._steps, self._what).items()
            if self._what.lanes.by_key[key].node not in {*known}
            for part in self._what.parts
            if part[:2] == key
        }
        return self._take_as_slow(level_of, step, "against others with equal work")

    def _take_as_slow(
        self, level_of: Mapping[Part, float], step: int, evidence: str
    ) -> list[Slowdown]:
        """Set the reference to the times that these parts would take if not slow.

        The references of other series move along. So if one part recovers, only that
        part appears faster, however many others there are.
        """
        if not level_of:
            return []
        at_of = {part: at for at, part in enumerate(self._what.parts)}
        level_P = np.array([level_of.get(part, 0.0) for part in self._what.parts])
        self._level_K[: len(level_P)] += level_P
        self._usual = without(self._usual, level_P, self._what)
        found = series(logs(self._steps, self._what), self._usual, self._what)
        shift_K = medians(found.apart_NK) - self._before.center_K
        self._moved_K = np.nan_to_num(shift_K) - self._level_K
        named = subjects_of([*level_of], self._what.share_of, self._what.lanes)
        return [
            self._note(
                subject,
                [at_of[part] for part in parts],
                step=step,
                since=self._steps[0].step,
                shift_K=self._level_K,
                evidence=evidence,
            )
            for subject, parts in named.items()
        ]

    def _risen(self, step: int, up_K: Bools) -> list[Slowdown]:
        """Return findings for series that lie higher than before."""
        found: list[Slowdown] = []
        num_parts = len(self._what.parts)
        of_parts = up_K & (np.arange(len(up_K)) < num_parts)
        if of_parts.any():
            found += self._slow_parts(step, of_parts)
        for at in map(int, np.flatnonzero(up_K & ~of_parts)):
            since = int(self._up.since_K[at])
            shift_K, own_K = self._since(since)
            self._clear(at)
            if own_K[at] < NOTICEABLE:
                self._moved_K[at] += shift_K[at] - self._level_K[at]
                continue
            self._level_K[at] = shift_K[at]
            subject = self._what.subject_at(at)
            links = [k for k in range(self._what.run_at + 1, len(up_K)) if k != at]
            evidence = _EVIDENCE.get(subject.what) or self._others(links, shift_K)
            found.append(
                self._note(
                    subject,
                    [at],
                    step=step,
                    since=since,
                    shift_K=shift_K,
                    evidence=evidence,
                )
            )
        return found

    def _slow_parts(self, step: int, up_K: Bools) -> list[Slowdown]:
        """Return findings for all parts that are about as slow as those that alarm."""
        since = int(self._up.since_K[np.argmax(np.where(up_K, self._up.sum_K, -1.0))])
        shift_K, own_K = self._since(since)
        rise_K = shift_K - self._level_K
        least = max(NOTICEABLE, rise_K[up_K].max() / 2)
        num_parts = len(self._what.parts)
        is_slow_K = (rise_K >= least) & (own_K >= NOTICEABLE)
        is_slow_K[num_parts:] = False
        if not is_slow_K.any():  # others have become faster
            self._moved_K += np.where(up_K, rise_K, 0.0)
            self._clear(up_K)
            return []
        self._clear(up_K | is_slow_K)
        slow = [self._what.parts[p] for p in np.flatnonzero(is_slow_K)]
        self._level_K = np.where(is_slow_K, shift_K, self._level_K)
        others = [p for p in range(num_parts) if not self._level_K[p]]
        named = subjects_of(slow, self._what.share_of, self._what.lanes)
        return [
            self._note(
                subject,
                [self._what.parts.index(part) for part in parts],
                step=step,
                since=since,
                shift_K=shift_K,
                evidence=self._others(others, shift_K),
            )
            for subject, parts in named.items()
        ]

    def _fallen(self, step: int, down_K: Bools) -> list[Slowdown]:
        """Return findings on recovered or less slow subjects; else move a reference."""
        found: list[Slowdown] = []
        for subject, slow in [*self._slow.items()]:
            fired = [at for at in slow.tests if down_K[at]]
            if not fired:
                continue
            down_K[slow.tests] = False
            since = int(max(self._down.since_K[fired]))
            shift_K, _ = self._since(since)
            factor = self._factor(slow.tests, shift_K)
            self._clear(slow.tests)
            if factor < math.exp(NOTICEABLE):
                self._level_K[slow.tests] = 0.0
                del self._slow[subject]
                found.append(
                    replace(slow.finding, step=step, since=since, is_over=True)
                )
                continue
            self._level_K[slow.tests] = shift_K[slow.tests]
            evidence = f"{slow.finding.factor:.1f}x before that"
            found.append(
                self._note(
                    subject,
                    slow.tests,
                    step=step,
                    since=since,
                    shift_K=shift_K,
                    evidence=evidence,
                )
            )
        for at in np.flatnonzero(down_K):
            shift_K, _ = self._since(int(self._down.since_K[at]))
            self._moved_K[at] += shift_K[at]
            self._clear(at)
        return found

    def _note(
        self,
        subject: Subject,
        tests: list[int],
        *,
        step: int,
        since: int,
        shift_K: Floats,
        evidence: str,
    ) -> Slowdown:
        for other, slow in [*self._slow.items()]:
            if {*slow.tests} & {*tests}:
                del self._slow[other]
        num_steps = sum(at >= since for at, _ in self._recent) or len(self._steps)
        finding = Slowdown(
            subject=subject,
            step=step,
            since=since,
            factor=self._factor(tests, shift_K),
            evidence=evidence,
            error=self._before.error(tests, num_steps),
        )
        self._slow[subject] = _Slow(finding, tests)
        return finding

    def _factor(self, tests: list[int], shift_K: Floats) -> float:
        """Return the slowdown factor of these series together."""
        share = [
            self._what.share_of[self._what.parts[at]]
            if at < len(self._what.parts)
            else 1.0
            for at in tests
        ]
        return float(np.average(np.exp(shift_K[tests]), weights=share))

    def _since(self, step: int) -> tuple[Floats, Floats]:
        """Return medians since this step minus the reference: `apart_NK`, `own_NK`."""
        rows = [found for at, found in self._recent if at >= step]
        apart_K = medians(np.array([found.apart_NK[0] for found in rows]))
        own_K = medians(np.array([found.own_NK[0] for found in rows]))
        return apart_K - self._center_K, own_K - self._moved_K

    def _others(self, tests: list[int], shift_K: Floats) -> str:
        """Return a description of the series that are not slow."""
        shifts = [shift_K[at] for at in tests if np.isfinite(shift_K[at])]
        if not shifts:
            return "no others to compare it with"
        low, high = min(shifts), max(shifts)
        if max(-low, high) < NOTICEABLE:
            return "others as before"
        return f"others {math.exp(low):.1f}x to {math.exp(high):.1f}x"

    def _clear(self, tests: Any) -> None:
        self._up.clear(tests)
        self._down.clear(tests)
