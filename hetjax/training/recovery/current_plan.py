# SPDX-License-Identifier: Apache-2.0
"""Holds a run's current cluster and plan; changes them with the nodes or on request.

Owns both, which clusters were found to have no plan, and when workers are ready for a
requested plan. Does not own which nodes are there (`membership.py`), planning
(`training/layout/plan_choice.py`), the requests (`training/replanning/`), nor sending
workers another plan (`driver.py`).
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetjax.cluster.cluster import Cluster, part_of
from hetjax.plans.plan import Plan
from hetjax.plans.worker_map import node_of
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.message import LIMITS
from hetjax.runtime.rpc.schema import Compile
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.recovered import nodes_used
from hetjax.training.recovery.standby_plans import plan_or_warn


@dataclass(slots=True)
class _Asked:
    """A requested plan, due once workers have compiled it or had the time to."""

    plan: Plan
    compiles_since_s: float | None = None
    is_ready: bool = False


class CurrentPlan:
    """The current `plan` of a run, on the nodes of `cluster`."""

    def __init__(self, cluster: Cluster, plan: Plan, config: DriverConfig) -> None:
        self.cluster, self.plan, self._config = cluster, plan, config
        self._refused: Cluster | None = None  # as there is no plan for it
        self._asked: _Asked | None = None

    def move_to(self, plan: Plan | None) -> None:
        """Request this plan for the same nodes; None withdraws the request."""
        self._asked = None if plan is None else _Asked(plan)

    def is_outdated(self, again: bool = False) -> bool:
        """Return whether nodes have come or gone, or a requested plan is ready."""
        now, asked = self._config.membership.now, self._asked
        is_due = asked is not None and asked.is_ready
        return self._config.recovers and (self._is_other(now(again=again)) or is_due)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings from which workers are built."""
        return self._settings(self.cluster, self.plan)

    def _settings(self, cluster: Cluster, plan: Plan) -> Mapping[str, Any]:
        return self._config.context.worker_settings(cluster, plan)

    def standby(
        self, controller: Controller
    ) -> Iterator[tuple[Mapping[str, Any], Plan]]:
        """Yield settings and plans that workers may compile ahead.

        These are plans for the loss of a node, and a requested plan.
        """
        if not self._config.recovers:
            return
        settings, standby_plans = self._settings, self._config.standby_plans
        for cluster, plan in standby_plans.found(self.cluster, self.plan):
            yield settings(cluster, plan), plan
        asked = self._asked
        if asked is None or asked.is_ready:
            return
        # hosts of one node would have to compile together
        several = any(node.hosts > 1 for node in self.cluster.nodes)
        if several or not self._config.compiles_ahead:
            asked.is_ready = True
        elif asked.compiles_since_s is None:
            asked.compiles_since_s = time.monotonic()
            yield settings(self.cluster, asked.plan), asked.plan
        else:
            took_s, nodes = time.monotonic() - asked.compiles_since_s, asked.plan.nodes
            workers = [w for w in controller.workers if node_of(w) in nodes]
            is_late = took_s > LIMITS[Compile].seconds
            asked.is_ready = is_late or controller.are_compiled(workers)

    def leave(self, node: str) -> bool:
        """Go on without the node from the next step on; return False if impossible.

        May be called from another thread: the node may be gone before there is a plan.
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
        """Plan again if the nodes have changed, else take a ready requested plan.

        Return whether the plan, or the nodes that it uses, have changed. If there is no
        plan for the nodes that are left, the run keeps its plan, unless another one
        `is_needed`: then raises NoFeasiblePlan.
        """
        cluster, asked = self._config.membership.now(again=True), self._asked
        if not self._is_other(cluster, is_needed):
            if asked is None or not asked.is_ready or is_needed:
                return False
            self.plan, self._asked = asked.plan, None
            return True
        self._asked = None
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

    def _is_other(self, cluster: Cluster, is_needed: bool = False) -> bool:
        """Return whether to plan for these nodes: if needed, again after a refusal."""
        return cluster != self.cluster and (is_needed or cluster != self._refused)

    def _plan_or_warn(self, cluster: Cluster) -> Plan | None:
        return plan_or_warn(self._config.standby_plans.plan, cluster, self.plan)
