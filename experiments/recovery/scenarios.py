# SPDX-License-Identifier: Apache-2.0
"""Defines the scenarios of the recovery experiment: plans before and after, and losses.

Owns the scenarios and the data that each must move over which links, and so their
minimum times.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hetjax.plans.plan import Plan, Replica, Stage, StageMesh

SEQ_LEN, BATCH = 64, 4
NUM_LAYERS = 14  # embedding, 12 blocks, head
NODES = ("a", "b", "c", "d")
DEVICES = 2  # of each node; most plans use one


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A change of a run: node `killed` dies, with its disk if `wiped`.

    `after` is the plan from then on, on the nodes `there`. `from_cloud` are layers that
    no node holds any more. `from_peers` are layers that a node must fetch from another,
    as (giver, layers).
    """

    title: str
    before: Plan
    after: Plan
    there: tuple[str, ...]
    killed: str | None = None
    wiped: bool = False
    from_cloud: range = range(0)
    from_peers: tuple[tuple[str, range], ...] = ()

    @property
    def replica_survives(self) -> bool:
        return not self.from_cloud

    @property
    def is_foreseen(self) -> bool:
        """Whether a run can have prepared the plan: it needs one node less."""
        return self.killed is not None and self.killed not in self.there


def stage(node: str, first: int, last: int, tensor: int = 1, ahead: int = 1) -> Stage:
    return Stage(
        node=node,
        devices=tuple(range(tensor)),
        mesh=StageMesh(data=1, tensor=tensor),
        layers=(first, last),
        launch_ahead=ahead,
    )


def replica(*stages: Stage, share: int = 1) -> Replica:
    return Replica(
        num_microbatches=BATCH // share // 2, microbatch_size=2, stages=stages
    )


def plan(model: str, *replicas: Replica) -> Plan:
    return Plan(model=model, seq_len=SEQ_LEN, global_batch=BATCH, replicas=replicas)


def scenarios(model: str) -> Mapping[str, Scenario]:
    """Return all scenarios by name."""
    halves = (stage("a", 0, 7, ahead=2), stage("b", 7, 14))
    others = (stage("c", 0, 7, ahead=2), stage("d", 7, 14))
    two = plan(model, replica(*halves, share=2), replica(*others, share=2))
    one = plan(model, replica(*halves))
    thirds = plan(
        model,
        replica(
            stage("a", 0, 5, ahead=3), stage("b", 5, 9, ahead=2), stage("c", 9, 14)
        ),
    )
    mixed = plan(model, replica(*halves, share=2), replica(stage("c", 0, 14), share=2))
    tensor = plan(
        model,
        replica(stage("a", 0, 10, tensor=2, ahead=2), stage("b", 10, 14, tensor=2)),
    )
    return {
        "spot-node-back": Scenario(
            title="a node is lost and comes back empty, a replica survives",
            before=two,
            after=two,
            there=NODES,
            killed="d",
            wiped=True,
            from_peers=(("b", range(7, 14)),),
        ),
        "spot-node-gone": Scenario(
            title="a node is lost for good, a replica survives",
            before=two,
            after=one,
            there=("a", "b", "c"),
            killed="d",
            wiped=True,
        ),
        "stage-lost": Scenario(
            title="the only holder of a stage is lost and comes back empty",
            before=thirds,
            after=thirds,
            there=("a", "b", "c"),
            killed="c",
            wiped=True,
            from_cloud=range(9, 14),
        ),
        "other-tensor-degree": Scenario(
            title="a node is lost, others go on with other cuts and tensor degree 2",
            before=mixed,
            after=tensor,
            there=("a", "b"),
            killed="c",
            wiped=True,
            from_peers=(("b", range(7, 10)),),
        ),
        "nodes-added": Scenario(
            title="two nodes come and take a second replica",
            before=one,
            after=two,
            there=NODES,
            from_peers=(("a", range(0, 7)), ("b", range(7, 14))),
        ),
    }
