# SPDX-License-Identifier: Apache-2.0
"""Plans for what is likely to happen next, made and compiled while the run trains.

Owns which clusters are likely (this one without one of its nodes), the thread that
plans for them, and the plans that it has found. Does not own planning itself
(`placement.py`) nor who compiles (`hetjax/runtime/serving.py`).
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence

from hetjax.cluster.cluster import Cluster, part_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.plans.plan import Plan

_MOST_CLUSTERS = 8

Replan = Callable[[Cluster, Plan], Plan]


class Foresight:
    """Looks ahead `after_s` seconds after each change; never if that is 0.

    Used from one thread, that of the run.
    """

    def __init__(self, replan: Replan, after_s: float) -> None:
        self._replan, self._after_s = replan, after_s
        self._plans: dict[tuple[Cluster, Plan], Plan] = {}
        self._told: set[tuple[Cluster, Plan]] = set()
        self._now: tuple[Cluster, Plan] | None = None
        self._since_s, self._looks = 0.0, False

    def plan(self, cluster: Cluster, current: Plan) -> Plan:
        """The plan for this cluster: the one that was foreseen, else a new one."""
        return self._plans.get((cluster, current)) or self._replan(cluster, current)

    def found(self, cluster: Cluster, plan: Plan) -> list[tuple[Cluster, Plan]]:
        """What has been foreseen from here and was not told yet."""
        if (cluster, plan) != self._now:
            self._now, self._since_s = (cluster, plan), time.monotonic()
            self._looks, self._told = False, set()
            self._plans = {}
        waited = time.monotonic() - self._since_s >= self._after_s > 0
        if waited and not self._looks:
            self._looks = True
            asked = cluster, plan, self._plans
            threading.Thread(target=self._look, args=asked, daemon=True).start()
        fresh = [key for key in list(self._plans) if key not in self._told]
        self._told.update(fresh)
        return [(key[0], self._plans[key]) for key in fresh]

    def _look(
        self, cluster: Cluster, plan: Plan, plans: dict[tuple[Cluster, Plan], Plan]
    ) -> None:
        for other in likely(cluster, plan):
            if self._now != (cluster, plan):
                return
            try:
                plans[other, plan] = self._replan(other, plan)
            except NoFeasiblePlan:
                continue  # nothing to be ready for
            except Exception as error:
                return warnings.warn(f"no plans ahead: {error}", stacklevel=1)


def plan_or_warn(
    replan: Replan, cluster: Cluster, current: Plan, then: str = ""
) -> Plan | None:
    """The plan for this cluster; None, with a warning that ends in `then`, if none."""
    try:
        return replan(cluster, current)
    except (BadInput, NoFeasiblePlan) as none:
        names = ", ".join(node.name for node in cluster.nodes)
        # told of whoever asked: of one place Python tells the same thing once
        warnings.warn(f"no plan for {names} alone ({none.got}){then}", stacklevel=3)
        return None


def likely(cluster: Cluster, plan: Plan) -> Sequence[Cluster]:
    """The cluster without one of the nodes that the plan uses, spot nodes first."""
    used = {stage.node for _, _, stage in plan.stages()}
    nodes = [node for node in cluster.nodes if node.name in used]
    if len(cluster.nodes) == 1 or any(node.hosts > 1 for node in cluster.nodes):
        return []  # hosts of one node compile together, or not at all
    names = [node.name for node in sorted(nodes, key=lambda node: not node.spot)]
    every = {node.name for node in cluster.nodes}
    return [part_of(cluster, every - {name}) for name in names[:_MOST_CLUSTERS]]
