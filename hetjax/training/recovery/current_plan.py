# SPDX-License-Identifier: Apache-2.0
"""The cluster and the plan that a run goes by now, and another one when nodes change.

Owns both, and which clusters were found to have no plan. Does not own who is there
(`membership.py`), planning (`training/layout/plan_choice.py`), nor telling workers
about another plan (`driver.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hetjax.cluster.cluster import Cluster, part_of
from hetjax.plans.plan import Plan
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.recovered import nodes_used
from hetjax.training.recovery.standby_plans import plan_or_warn


class CurrentPlan:
    """What a run goes by: `plan`, on the nodes of `cluster`."""

    def __init__(self, cluster: Cluster, plan: Plan, config: DriverConfig) -> None:
        self.cluster, self.plan, self._config = cluster, plan, config
        self._refused: Cluster | None = None  # as there is no plan for it

    def is_outdated(self, again: bool = False) -> bool:
        """Whether nodes have come or gone, and another plan is to be looked for."""
        now = self._config.membership.now
        return self._config.recovers and self._is_other(now(again=again))

    @property
    def settings(self) -> Mapping[str, Any]:
        """What workers are built from."""
        return self._config.context.worker_settings(self.cluster, self.plan)

    def standby(self) -> Iterator[tuple[Mapping[str, Any], Plan]]:
        """Settings and plan for the loss of a node, which workers may compile ahead."""
        if self._config.recovers:
            standby_plans = self._config.standby_plans
            for cluster, plan in standby_plans.found(self.cluster, self.plan):
                yield self._config.context.worker_settings(cluster, plan), plan

    def leave(self, node: str) -> bool:
        """Go on without the node from the next step on; False if nothing can.

        Called by a thread of its own: the node may be gone before there is a plan.
        """
        membership = self._config.membership
        now = membership.now()
        names = {found.name for found in now.nodes}
        rest = names - {node}
        if not (self._config.recovers and rest):
            return False
        if node in names and self._plan_or_warn(part_of(now, rest)) is None:
            return False
        return membership.leave(node)

    def replan(self, is_needed: bool) -> bool:
        """Make another plan if there are other nodes than before; whether it is one.

        Raises NoFeasiblePlan if one `is_needed` and there is none for those that are
        left; else the run keeps the plan that it has.
        """
        cluster = self._config.membership.now(again=True)
        if not self._is_other(cluster):
            return False
        if is_needed:
            plan = self._config.standby_plans.plan(cluster, self.plan)
        elif (plan := self._plan_or_warn(cluster)) is None:
            self._refused = cluster
            return False
        used = (nodes_used(where, plan) for where in (cluster, self.cluster))
        is_another = plan != self.plan or len({*map(tuple, used)}) > 1
        self.cluster = cluster
        if is_another:
            self.plan = plan
        return is_another

    def _is_other(self, cluster: Cluster) -> bool:
        return cluster not in (self.cluster, self._refused)

    def _plan_or_warn(self, cluster: Cluster) -> Plan | None:
        return plan_or_warn(self._config.standby_plans.plan, cluster, self.plan)
