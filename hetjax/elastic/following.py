# SPDX-License-Identifier: Apache-2.0
"""Which nodes a run in one process goes on with, and by which plan.

Owns which nodes of now this process has devices for, and what is said where it has
none, or where there is no plan. Does not own who is there (`membership.py`), how plans
are made (`training/placement.py`), nor the change itself (`training/local.py`).
"""

import warnings
from collections.abc import Collection
from dataclasses import replace

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.elastic.foresight import Replan, plan_or_warn
from hetjax.elastic.membership import Membership
from hetjax.plans.plan import Plan


class Following:
    """Follows `membership` with the nodes whose devices this process has.

    Those are the nodes of `cluster`, as it is given: JAX has its devices from its
    start. `cluster` is then always the one in use; `leave` is for any thread.
    """

    def __init__(
        self, cluster: Cluster, membership: Membership, replan: Replan
    ) -> None:
        self.cluster, self._membership = cluster, membership
        self._had = {node.name: node for node in cluster.nodes}
        self._seen, self._refused = cluster, set[Node]()
        self._replan = replan

    def leave(self, node: str, current: Plan) -> bool:
        """Go on without this node; False if there is none, or no plan without it.

        Plans at once, so that whoever asks can stop the run instead.
        """
        now = self._membership.now()
        rest = self._usable(now, {found.name for found in now.nodes} - {node})
        if rest is None or self._plan(rest, current) is None:
            return False
        return self._membership.leave(node)

    def change(self, current: Plan) -> Plan | None:
        """The plan to go on with if other nodes are there than before, else None."""
        now = self._membership.now()
        if now == self._seen:
            return None
        self._seen = now
        cluster = self._usable(now, {node.name for node in now.nodes})
        if cluster in (None, self.cluster):
            return None
        plan = self._plan(cluster, current)
        if plan is not None:
            self.cluster = cluster
        return plan

    def _usable(self, now: Cluster, names: Collection[str]) -> Cluster | None:
        """Those of the named nodes that have devices here; None if none has."""
        asked = [node for node in now.nodes if node.name in names]
        usable = tuple(filter(None, map(self._here, asked)))
        if usable:
            return replace(part_of(now, {node.name for node in usable}), nodes=usable)
        if asked:
            warnings.warn(f"no other node is there: {self._kept()}", stacklevel=2)
        return None

    def _here(self, node: Node) -> Node | None:
        """What this process has devices for; warns once if that is another node."""
        had = self._had.get(node.name)
        if had and had.device == node.device and had.count >= node.count:
            return node
        if node not in self._refused:
            self._refused.add(node)
            as_ = f"used as {had.count} x {had.device}" if had else "not used"
            warnings.warn(
                f"node {node.name!r} ({node.count} x {node.device}) is {as_}: this "
                "process gets no other devices while it runs; stop the run (it saves "
                "its state) and start it again to use the node",
                stacklevel=2,
            )
        return had

    def _plan(self, cluster: Cluster, current: Plan) -> Plan | None:
        return plan_or_warn(self._replan, cluster, current, f": {self._kept()}")

    def _kept(self) -> str:
        names = ", ".join(node.name for node in self.cluster.nodes)
        return f"the run keeps the plan that it has, on {names}"
