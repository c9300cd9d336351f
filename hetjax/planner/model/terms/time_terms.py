# SPDX-License-Identifier: Apache-2.0
"""Computes the seconds of layers under the planner's options.

Owns seconds by layer and option, before stages are known. Does not own how seconds are
found (`costs/stage_times.py`) nor their use in a problem (`terms.py`).
"""

from hetjax.cluster.cluster import Node
from hetjax.costs.graph.passes import Shares
from hetjax.costs.measured.layer_profile import profile_with
from hetjax.costs.network.nearest import least_shared_card_bytes_per_s
from hetjax.costs.stage_times import (
    LayerTimes,
    layer_halves_s,
    layer_times,
    least_update_s,
)
from hetjax.planner.model.problem import Option
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.memory_terms import node_of
from hetjax.plans.plan import Stage, StageMesh


def option_times(
    request: PlanRequest, option: Option, layer: int, shares: Shares
) -> LayerTimes:
    node = node_of(request, option)
    return layer_times(
        request.model,
        layer,
        _stage_of(request, option),
        node,
        shares,
        tensor_card_bytes_per_s=_card_bytes_per_s(node, option),
        optimizer=request.optimizer,
        profile=request.profile,
    )


def option_least_update_s(
    request: PlanRequest, option: Option, layer: int, shares: Shares
) -> float:
    node, stage = node_of(request, option), _stage_of(request, option)
    return least_update_s(
        request.model,
        layer,
        stage,
        node,
        shares,
        optimizer=request.optimizer,
        profile=request.profile,
    )


def option_halves_s(
    request: PlanRequest, option: Option, layer: int, shares: Shares
) -> float:
    node, stage = node_of(request, option), _stage_of(request, option)
    return layer_halves_s(
        request.model,
        layer,
        stage,
        node,
        shares,
        tensor_card_bytes_per_s=_card_bytes_per_s(node, option),
        profile=request.profile,
    )


def _card_bytes_per_s(node: Node, o: Option) -> float:
    shape = dict(num_rings=o.data, devices_per_ring=o.tensor)
    return least_shared_card_bytes_per_s(node, **shape)


def option_program_s(request: PlanRequest, option: Option) -> float:
    """Return the measured cost of enqueueing a program; 0 if not measured."""
    known = profile_with(request.profile, node_of(request, option).device)
    return known.program_s if known else 0.0


def _stage_of(request: PlanRequest, option: Option) -> Stage:
    return Stage(
        node=node_of(request, option).name,
        devices=tuple(range(option.num_devices)),
        mesh=StageMesh(data=option.data, tensor=option.tensor),
        layers=(0, 1),
        remat=option.remat,
        offload=option.offload,
        launch_ahead=1,
    )
