# SPDX-License-Identifier: Apache-2.0
"""Computes what baselines share: costs of stages and pipelines, and the best plans.

Owns the look-up of options, and the usual closed form for many pipelines at once (sum
of all stages and hops there and back plus m - 1 times the slowest). Owns how many plans
a baseline returns, and the error if it has none. Does not own the costs
(`model/terms/terms.py`), nor the cost formulas specific to two of the papers.

Letters of array names: as in `model/problem.py`, and Q pipelines, S stages, J the S + 1
bounds of their layer ranges, R remats.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetjax.cluster.catalogue import DeviceSpec, device_spec
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.cuts import StageCuts
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import UnplacedReplica
from hetjax.planner.model.templates import shown_s
from hetjax.planner.model.terms.terms import search_problem
from hetjax.plans.plan import Plan, Remat

MOST_PLANS = 16  # enough that a few turn out to be within memory


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """A request, and the costs of its stages under every option."""

    request: PlanRequest
    problem: Problem

    @cached_property
    def meshes(self) -> list[tuple[int, int]]:
        """The (tensor, data) degrees that some class has an option for."""
        return sorted({(o.tensor, o.data) for o in self.problem.options})

    @cached_property
    def specs(self) -> list[DeviceSpec]:
        """The device specification of each class."""
        return [device_spec(c.nodes[0]) for c in self.request.classes]

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """(index, microbatch size) of the sizes that divide the global batch."""
        found = enumerate(self.problem.microbatch_sizes)
        return [(b, n) for b, n in found if self.request.global_batch % n == 0]

    @cached_property
    def num_inner_layers(self) -> int:
        """The number of layers between embedding and head, at least 1. There are no
        more stages than that."""
        return max(self.problem.num_layers - 2, 1)

    @cached_property
    def tensor_meshes(self) -> list[tuple[int, int]]:
        """Every tensor degree, with the least data degree, for planners that express
        data parallelism as separate replicas."""
        least = min((data for _, data in self.meshes), default=1)
        return [(tensor, data) for tensor, data in self.meshes if data == least]

    def num_seats_C(self, num_devices: int) -> tuple[int, ...]:
        """Return how many stages of so many devices fit on the nodes of each class."""
        return tuple(
            sum(node.count // num_devices for node in nodes.nodes)
            for nodes in self.request.classes
        )

    def remats_C(self, tensor: int, data: int) -> list[tuple[Remat, Ints]]:
        """Return every remat with the option of each class; -1 if there is none."""
        classes, index = range(len(self.problem.classes)), self._index
        return [
            (r, np.array([index.get((c, tensor, data, r), -1) for c in classes]))
            for r in dict.fromkeys(self.request.remats)
        ]

    @cached_property
    def _index(self) -> dict[tuple[int, int, int, Remat], int]:
        return {
            (o.device_class, o.tensor, o.data, o.remat): n
            for n, o in enumerate(self.problem.options)
            if o.offload == self.request.offloads[0]
        }


@lru_cache(maxsize=2)  # all baselines of a comparison use the same costs
def stage_costs(request: PlanRequest) -> StageCosts:
    """Return the costs of the request's options, for all its tensor degrees."""
    problem = search_problem(request, request.degrees, packing=False)
    return StageCosts(request=request, problem=problem)


def in_memory(
    p: Problem, b: int, options_QS: Ints, cuts_QJ: Ints, num_microbatches: Ints
) -> NDArray[np.bool_]:
    """Return for each pipeline whether all stages fit 1F1B's microbatches in flight."""
    rows_QS = p.range_IJ[cuts_QJ[:, :-1], cuts_QJ[:, 1:]]
    num_stages = options_QS.shape[1]
    to_end_S = np.arange(num_stages, 0, -1)
    ahead_QS = np.minimum(to_end_S, np.reshape(num_microbatches, (-1, 1)))
    return (p.most_in_flight_BOU[b, options_QS, rows_QS] >= ahead_QS).all(axis=1)


def closed_s(
    p: Problem,
    b: int,
    options_QS: Ints,
    cuts_QJ: Ints,
    num_microbatches: Ints,
    num_replicas: int,
) -> Floats:
    """Return each pipeline's step by the closed form, including the gradient sum.

    Infinity if an option does not exist at the microbatch size.
    """
    rows_QS = p.range_IJ[cuts_QJ[:, :-1], cuts_QJ[:, 1:]]
    stage_s_QS = p.busy_s_BOU[b, options_QS, rows_QS]
    at = b, p.kind_J[cuts_QJ[:, 1:-1]], options_QS[:, :-1], options_QS[:, 1:]
    hop_s_QS, link_s_QS = p.hop_s_BKOO[at], p.link_s_BKOO[at]
    slowest_s_Q = np.maximum(stage_s_QS.max(axis=1), link_s_QS.max(axis=1, initial=0.0))
    fill_s_Q = stage_s_QS.sum(axis=1) + 2 * hop_s_QS.sum(axis=1)
    total_s_Q = fill_s_Q + (num_microbatches - 1) * slowest_s_Q
    total_s_Q += after_s(p, b, options_QS, rows_QS, num_replicas)
    return np.where(np.isnan(total_s_Q), np.inf, total_s_Q)


def priced(
    costs: StageCosts,
    b: int,
    options_S: Sequence[int],
    cuts: StageCuts,
    num_microbatches: int,
    num_replicas: int,
) -> tuple[UnplacedReplica, float]:
    """Return an unplaced pipeline, and its step by the closed form."""
    p, counts_Q = costs.problem, np.array([num_microbatches])
    rows = np.array([options_S]), np.array([cuts])
    pipeline = UnplacedReplica(
        num_microbatches=num_microbatches,
        microbatch_size=p.microbatch_sizes[b],
        stages=tuple(
            (p.options[o], layers)
            for o, layers in zip(options_S, pairwise(cuts), strict=True)
        ),
    )
    return pipeline, float(closed_s(p, b, *rows, counts_Q, num_replicas)[0])


def after_s(
    p: Problem, b: int, options_QS: Ints, rows_QS: Ints, num_replicas: int
) -> Floats:
    """Return the terms after each pipeline has drained: gradient sum and update."""
    # `p` prices sums of very many replicas: each sends 2 (R - 1) / R of the bytes
    shares = (1 - 1 / num_replicas, 1.0)
    after_s_AQS = p.after_s_ABOU[:, b, options_QS, rows_QS]
    after_s_AQS = after_s_AQS * np.reshape(shares, (-1, 1, 1))
    return shown_s(p, after_s_AQS, p.drain_s_BOU[b, options_QS, rows_QS]).sum(axis=0)


def shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Split a count in proportion to weights, at least 1 each, by largest remainder.

    `total` must be at least the number of weights.
    """
    assert total >= len(weights)
    exact = total * np.array(weights) / sum(weights)
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while counts.sum() != total:
        owed = exact - counts
        if counts.sum() < total:
            counts[owed.argmax()] += 1
        else:
            counts[np.where(counts > 1, owed, np.inf).argmin()] -= 1
    return counts.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan built on demand; `plan` returns None if the nodes cannot hold it."""

    step_s: float
    plan: Callable[[], Plan | None]


def best_first(
    name: str, request: PlanRequest, candidates: Iterable[Candidate]
) -> list[Plan]:
    """Return the best distinct plans. Raises NoFeasiblePlan if there is none."""
    found: list[Plan] = []
    possible = filter(_is_possible, candidates)
    for candidate in sorted(possible, key=lambda c: c.step_s):
        check_deadline()
        plan = candidate.plan()
        if plan is not None and plan not in found:
            found.append(plan)
        if len(found) == MOST_PLANS:
            break
    if not found:
        raise no_plan(name, request)
    return found


def _is_possible(candidate: Candidate) -> bool:
    check_deadline()
    return math.isfinite(candidate.step_s)


def no_plan(name: str, request: PlanRequest) -> NoFeasiblePlan:
    """Return the error that says which limit binds."""
    batch, sizes = request.global_batch, request.microbatch_sizes
    if all(batch % size for size in sizes):
        return NoFeasiblePlan(
            got=f"{name}: no microbatch size of {', '.join(map(str, sizes))} divides "
            f"global_batch = {batch}",
            allowed="a microbatch size that divides the global batch",
            fix="give --microbatch-sizes 1, or another --global-batch",
        )
    return NoFeasiblePlan(
        got=f"{name}: no layout of {request.model.name!r} on the cluster's "
        f"{request.cluster.num_devices} devices fits into memory",
        allowed="weights, optimizer state and microbatches in flight within the memory "
        "of every device",
        fix="allow remat full, microbatch size 1 and all tensor degrees, or add nodes",
    )
