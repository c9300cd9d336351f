# SPDX-License-Identifier: Apache-2.0
"""Keeps plans for likely changes of the cluster, made while the run trains.

Owns which clusters are likely (this one without one of its nodes), when to plan for
them, and the plans found so far, also for a node that is about to leave. Does not own
planning itself (`training/layout/plan_choice.py`), the process that plans ahead
(`training/layout/planning_process.py`), nor compiling
(`hetjax/runtime/worker/background.py`, `hetjax/runtime/worker/service.py`).
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from hetjax.cluster.cluster import Cluster, part_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.plans.plan import Plan
from hetjax.training.recovery.recovered import nodes_used

_MOST_CLUSTERS = 8

Replan = Callable[[Cluster, Plan], Plan]


class PlanningAhead(Protocol):
    """Planning for some clusters, done elsewhere."""

    def found(self) -> list[tuple[Cluster, Plan]]:
        """Return the plans since the last call, without waiting."""
        ...

    def close(self) -> None:
        """Abandon what is not planned yet."""
        ...


class StandbyPlans:
    """Plans ahead `after_s` seconds after each change; never if that is 0.

    `begin` starts to plan for clusters, in place of a current plan.
    """

    def __init__(
        self,
        replan: Replan,
        begin: Callable[[Sequence[Cluster], Plan], PlanningAhead],
        after_s: float,
    ) -> None:
        self._replan, self._begin, self._after_s = replan, begin, after_s
        self._plans: dict[tuple[Cluster, Plan], Future[Plan]] = {}
        self._lock = threading.Lock()  # another thread plans for a node that leaves
        self._now: tuple[Cluster, Plan] | None = None
        self._since_s, self._has_begun = 0.0, False
        self._planning: PlanningAhead | None = None

    def plan(self, cluster: Cluster, current: Plan) -> Plan:
        """Return the plan for this cluster: one that was made before, else a new one.

        May be called from any thread; no plan is made twice.
        """
        key, made = (cluster, current), Future[Plan]()
        with self._lock:
            known = self._plans.setdefault(key, made)
        if known is made:
            try:
                made.set_result(self._replan(cluster, current))
            except BaseException as error:
                self._plans.pop(key, None)  # not kept: the next try may succeed
                made.set_exception(error)
        return known.result()

    def found(self, cluster: Cluster, plan: Plan) -> list[tuple[Cluster, Plan]]:
        """Return the plans made ahead for this state that were not returned before."""
        if (cluster, plan) != self._now:
            self.close()
            self._now, self._since_s = (cluster, plan), time.monotonic()
            self._has_begun = False
            with self._lock:
                kept = {
                    key: made for key, made in self._plans.items() if key[1] == plan
                }
                self._plans = kept
        waited = time.monotonic() - self._since_s >= self._after_s > 0
        if waited and not self._has_begun:
            self._has_begun = True
            clusters = likely(cluster, plan)
            self._planning = self._begin(clusters, plan) if clusters else None
        fresh = self._planning.found() if self._planning else []
        for other, found in fresh:
            self._plans.setdefault((other, plan), _done(found))
        return fresh

    def forget(self) -> None:
        """Discard all plans: costs have changed."""
        self.close()
        with self._lock:
            self._plans = {}
        self._now = None

    def close(self) -> None:
        """Stop planning ahead."""
        if self._planning is not None:
            self._planning.close()
            self._planning = None


def _done(plan: Plan) -> Future[Plan]:
    done = Future[Plan]()
    done.set_result(plan)
    return done


def plan_or_warn(replan: Replan, cluster: Cluster, current: Plan) -> Plan | None:
    """Return the plan for this cluster; if there is none, return None and warn."""
    try:
        return replan(cluster, current)
    except (BadInput, NoFeasiblePlan) as none:
        names = ", ".join(node.name for node in cluster.nodes)
        # at the caller's line: Python shows a warning once for each line
        why = f"no plan for the nodes {names}: {none.got}; fix: {none.fix}"
        warnings.warn(why, stacklevel=3)
        return None


def likely(cluster: Cluster, plan: Plan) -> Sequence[Cluster]:
    """Return one cluster per node of the plan, without that node; spot nodes first."""
    nodes = nodes_used(cluster, plan)
    if len(cluster.nodes) == 1 or any(node.hosts > 1 for node in cluster.nodes):
        return []  # hosts of one node compile together, or not at all
    names = [node.name for node in sorted(nodes, key=lambda node: not node.spot)]
    return [part_of(cluster, cluster.names - {name}) for name in names[:_MOST_CLUSTERS]]
