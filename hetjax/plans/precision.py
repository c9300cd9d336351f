# SPDX-License-Identifier: Apache-2.0
"""Determines each stage's precision: the plan's, the user's, or the device's best.

Owns the order of precedence between these. Does not own the best precision of a device
(`cluster/catalogue.py`) nor the precision of measurements (`costs/`).
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

# What a user asks for; "best": the best precision of each device
Dtype = Literal["best", "bfloat16", "float16", "float32"]


def node_precision(node: Node, asked: Dtype | None = None) -> Precision:
    """Return the precision of stages on the node that give none themselves.

    A device is assumed to have bf16 if neither its node nor the catalogue names its
    best precision.
    """
    if asked is not None and asked != "best":
        return asked
    if node.precision is not None:
        return node.precision
    known = catalogue().get(canonical_name(node.device))
    return best_precision(known) if known else "bfloat16"


def stage_precision(stage: Stage, node: Node, asked: Dtype | None = None) -> Precision:
    """Return the precision in which the stage computes on its node."""
    return stage.precision or node_precision(node, asked)


def with_precisions(plan: Plan, cluster: Cluster, asked: Dtype | None = None) -> Plan:
    """Return the plan with every stage's precision filled in."""
    of_node: dict[str, Precision] = {
        node.name: node_precision(node, asked) for node in cluster.nodes
    }
    return with_node_precisions(plan, of_node)


def with_node_precisions(plan: Plan, precisions: Mapping[str, Precision]) -> Plan:
    """Return the plan with the node's precision in every stage that gives none.

    `precisions` is keyed by node name.
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
