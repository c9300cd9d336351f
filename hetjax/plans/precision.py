# SPDX-License-Identifier: Apache-2.0
"""What the stages of a plan compute in: as they say, as was asked for, or as is best.

Owns the order in which these are asked. Does not own what is best for a device
(`cluster/catalogue.py`) nor what was measured in (`costs/`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from hetjax.cluster.catalogue import (
    Precision,
    best_precision,
    canonical_name,
    catalogue,
)
from hetjax.cluster.cluster import Cluster, Node
from hetjax.plans.plan import Plan, Stage

# What a person asks for; "best": on every device what it does best
Dtype = Literal["best", "bfloat16", "float16", "float32"]


def node_precision(node: Node, asked: Dtype | None = None) -> Precision:
    """Return what a stage on the node computes in unless it says so itself.

    A device that the catalogue does not know is taken to have bf16.
    """
    if asked is not None and asked != "best":
        return asked
    if node.precision is not None:
        return node.precision
    known = catalogue().get(canonical_name(node.device))
    return best_precision(known) if known else "bfloat16"


def stage_precision(stage: Stage, node: Node, asked: Dtype | None = None) -> Precision:
    """Return what the stage computes in on its node."""
    return stage.precision or node_precision(node, asked)


def with_precisions(plan: Plan, cluster: Cluster, asked: Dtype | None = None) -> Plan:
    """Return the plan with every stage's precision said."""
    of_node: dict[str, Precision] = {
        node.name: node_precision(node, asked) for node in cluster.nodes
    }
    return with_node_precisions(plan, of_node)


def with_node_precisions(plan: Plan, precisions: Mapping[str, Precision]) -> Plan:
    """Return the plan with that of its node for every stage that does not say its own.

    `precisions` is keyed by the names of nodes.
    """
    if all(stage.precision for _, _, stage in plan.stages()):
        return plan

    def said(stage: Stage) -> Stage:
        return replace(stage, precision=stage.precision or precisions[stage.node])

    replicas = tuple(
        replace(replica, stages=tuple(map(said, replica.stages)))
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas)
