# SPDX-License-Identifier: Apache-2.0
"""Finds HARP's plans (Hapt, arXiv 2509.24859): one pipeline over ordered clusters.

Owns the clusters, the orders in which they are tried (that of the file, and by zone),
and the conversion of the dynamic program's result to a plan. Clusters are our device
classes. Each search has one microbatch size. All devices should be used. Where counts
do not divide, or layers are fewer than stages, up to 1, 2, 4, ... groups of a cluster
stay idle: the least number that has a plan. The evaluator's schedule supplies the
launch-aheads of H-1F1B. In a cluster of more than 64 devices, a group is two devices,
four, and so on up to whole nodes. Does not own the dynamic program
(`hapt_program.py`).

Letters of array names: C clusters, K launch-aheads, I and J first layer and end of a
range, U different ranges, O options.
"""

from collections.abc import Sequence
from functools import partial
from itertools import permutations

import numpy as np

from hetjax.planner.baselines.hapt_program import (
    Cheapest,
    SubCluster,
    Submesh,
    Task,
    cheapest_pipeline,
    least_slowest_s,
)
from hetjax.planner.baselines.stage_costs import (
    Candidate,
    StageCosts,
    best_first,
    stage_costs,
)
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import UnplacedReplica, place
from hetjax.plans.plan import Plan

_MOST_GROUPS = 64  # groups of devices of a cluster; with more, groups are made larger
_FEW = 3  # classes, all of whose orders are tried
_HOPELESS = 1.1  # times the best; tasks with a larger lower bound are pruned


def hapt(request: PlanRequest, *, more_orders: bool = False) -> list[Plan]:
    """Return the best single pipelines, with `more_orders` than the two of the paper.
    Raises NoFeasiblePlan if none fits memory."""
    costs = stage_costs(request)
    tasks = [
        (b, order, task, limit_s)
        for order in _orders(costs, more_orders)
        for b, _ in costs.sizes
        for task, limit_s in [_possible_task(costs, b, order)]
        if np.isfinite(limit_s)
    ]
    tasks.sort(key=lambda t: t[3] * t[2].num_microbatches)
    candidates: list[Candidate] = []
    for b, order, task, limit_s in tasks:
        best_s = min((c.step_s for c in candidates), default=np.inf)
        if limit_s * task.num_microbatches <= _HOPELESS * best_s:
            found = cheapest_pipeline(task, limit_s)
            plan = partial(_plan, costs, b, order, task, found)
            candidates.append(Candidate(step_s=found.step_s, plan=plan))
    return best_first("hapt", request, candidates)


def _orders(costs: StageCosts, more: bool) -> list[tuple[int, ...]]:
    """Return the classes with options in the order of the file, and sorted by zone.

    With `more`, also return both backwards, or every order of few classes.
    """
    in_file = tuple(sorted({option.device_class for option in costs.problem.options}))
    classes = costs.request.classes
    by_zone = tuple(sorted(in_file, key=lambda c: classes[c].nodes[0].zone))
    orders = [in_file, by_zone]
    if more and len(in_file) <= _FEW:
        orders += permutations(in_file)
    elif more:
        orders += [in_file[::-1], by_zone[::-1]]
    return list(dict.fromkeys(orders))


def _possible_task(
    costs: StageCosts, b: int, order: Sequence[int]
) -> tuple[Task, float]:
    """Return the feasible task with the least idle devices, and its least limit."""
    idle = 0
    while True:
        task = _task(costs, b, order, idle)
        limit_s = least_slowest_s(task)
        if np.isfinite(limit_s) or idle > max(c.num_groups for c in task.clusters):
            return task, limit_s
        idle = max(2 * idle, 1)


def _task(costs: StageCosts, b: int, order: Sequence[int], num_idle: int) -> Task:
    p, layers = costs.problem, np.arange(costs.problem.num_layers + 1)
    total = costs.request.global_batch // p.microbatch_sizes[b]
    sizes = [_groups(costs, c) for c in order]
    num_stages = min(p.num_layers, sum(num for num, _ in sizes))
    num_ahead = num_stages + 2 * (len(order) - 1) + 1
    nearest = [_smallest(costs, c) for c in order]
    hop_s_CCJ = p.hop_s_BKOO[b][p.kind_J[layers]][:, nearest][:, :, nearest]
    return Task(
        clusters=tuple(
            _cluster(costs, b, c, num_idle, np.minimum(np.arange(num_ahead), total))
            for c in order
        ),
        hop_s_CCJ=np.moveaxis(hop_s_CCJ, 0, 2),
        num_microbatches=total,
    )


def _groups(costs: StageCosts, c: int) -> tuple[int, int]:
    """Return how many groups of devices a cluster has, and the devices per group."""
    nodes = costs.request.classes[c]
    each = 1
    while (
        nodes.num_devices // each > _MOST_GROUPS
        and nodes.devices_per_node % (2 * each) == 0
    ):
        each *= 2
    # no pipeline has more stages than layers
    most = costs.problem.num_layers * nodes.devices_per_node
    return min(nodes.num_devices, most) // each, each


def _cluster(
    costs: StageCosts, b: int, c: int, num_idle: int, ahead_K: Ints
) -> SubCluster:
    num_groups, each = _groups(costs, c)
    per_node = costs.request.classes[c].devices_per_node
    sizes = {1 << n for n in range(per_node.bit_length())} | {per_node}
    return SubCluster(
        num_groups=num_groups,
        num_idle=min(num_idle, num_groups),
        groups_per_node=per_node // each,
        straddles=per_node & (per_node - 1) != 0,
        submeshes=tuple(
            Submesh(num_groups=n // each, stage_s_KIJ=_stage_s(costs, b, c, n, ahead_K))
            for n in sorted(sizes)
            if each <= n and _options(costs, c, n).size
        ),
    )


def _options(costs: StageCosts, c: int, num_devices: int) -> Ints:
    return np.array(
        [
            o
            for o, option in enumerate(costs.problem.options)
            if (option.device_class, option.num_devices) == (c, num_devices)
        ],
        dtype=np.int64,
    )


def _smallest(costs: StageCosts, c: int) -> int:
    """Return the option that prices a cluster's messages: that on fewest devices."""
    options = costs.problem.options
    own = [o for o, option in enumerate(options) if option.device_class == c]
    return min(own, key=lambda o: options[o].num_devices)


def _fitting_s(costs: StageCosts, b: int, options: Ints, ahead: int) -> Floats:
    """Return the seconds of each option on each range of layers; infinity if it does
    not fit."""
    p = costs.problem
    fits_OU = p.most_in_flight_BOU[b, options] >= max(ahead, 1)
    return np.where(fits_OU, p.busy_s_BOU[b, options], np.inf)


def _stage_s(
    costs: StageCosts, b: int, c: int, num_devices: int, ahead_K: Ints
) -> Floats:
    """Return the seconds of the fastest fitting option, by launch-ahead and layers."""
    check_deadline()  # for a deep model the arrays below take half a GiB
    options, range_IJ = _options(costs, c, num_devices), costs.problem.range_IJ
    least_s_KU = np.array(
        [_fitting_s(costs, b, options, int(k)).min(axis=0) for k in ahead_K]
    )
    return np.where(range_IJ >= 0, least_s_KU[:, range_IJ], np.inf)


def _plan(
    costs: StageCosts, b: int, order: Sequence[int], task: Task, found: Cheapest
) -> Plan | None:
    p, request = costs.problem, costs.request
    stages = []
    for stage in found.stages:
        c = order[stage.cluster]
        submesh = task.clusters[stage.cluster].submeshes[stage.submesh]
        options = _options(costs, c, submesh.num_groups * _groups(costs, c)[1])
        ahead = min(stage.launch_ahead, task.num_microbatches)
        seconds_O = _fitting_s(costs, b, options, ahead)[:, p.range_IJ[stage.layers]]
        stages.append((p.options[options[seconds_O.argmin()]], stage.layers))
    pipeline = UnplacedReplica(
        num_microbatches=task.num_microbatches,
        microbatch_size=p.microbatch_sizes[b],
        stages=tuple(stages),
    )
    return place(request, [pipeline])
