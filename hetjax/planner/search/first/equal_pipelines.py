# SPDX-License-Identifier: Apache-2.0
"""Builds plans of equal pipelines, over one class of nodes or over two, to simulate.

The templates' model estimates sums of gradients roughly, and may miss the best plans
where sums take much of a step. There are few equal pipelines, so all are tried,
whatever the model's estimate. For every number of pipelines, each has as many stages as
there is room for in the one class, then in the other, cut as evenly as the layers'
times allow. Owns that family. Does not own shares of all classes
(`baselines/equal_shares.py`), nor the choice of the best plan (`incumbents.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from hetjax.planner.model.cuts import balanced_cuts
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Ints, Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import ORDERS, UnplacedReplica, place
from hetjax.planner.model.terms.terms import search_problem
from hetjax.plans.plan import LayerRange, Plan

_MOST_STAGES = 16
_LEFT = 1 / 3  # of the slowest stage's waiting under 1F1B, by other schedules
_MOST_LAYOUTS = (24, 8)  # simulated on one class, and on two in order


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Equal pipelines, and their seconds under a good schedule, without messages and
    sums."""

    promised_s: float
    microbatch_size: int
    num_microbatches: tuple[int, ...]  # of each pipeline
    options: tuple[int, ...]  # of each stage, by index
    layers: tuple[LayerRange, ...]

    def pipelines(self, p: Problem) -> list[UnplacedReplica]:
        options = (p.options[o] for o in self.options)
        stages = tuple(zip(options, self.layers, strict=True))
        return [
            UnplacedReplica(
                num_microbatches=count,
                microbatch_size=self.microbatch_size,
                stages=stages,
            )
            for count in self.num_microbatches
        ]

    def classes(self, p: Problem) -> tuple[int, ...]:
        """Return the classes along the pipeline, each once."""
        return tuple(dict.fromkeys(p.options[o].device_class for o in self.options))


def equal_pipelines(
    request: PlanRequest, best_s: Callable[[], float]
) -> Iterator[Plan]:
    """Yield plans of equal pipelines, the most promising first, as long as one could be
    faster than `best_s()`. Raises BadInput if the profile covers no device."""
    p = search_problem(request, request.degrees, num_replicas=2)
    tried = Counter[tuple[int, ...]]()
    for layout in sorted(_layouts(p), key=lambda layout: layout.promised_s):
        if layout.promised_s >= best_s():
            return
        classes = layout.classes(p)
        tried[classes] += 1
        if tried[classes] > _MOST_LAYOUTS[len(classes) - 1]:
            continue
        placed = (place(request, layout.pipelines(p), order) for order in ORDERS)
        yield from (plan for plan in dict.fromkeys(placed) if plan is not None)


def _layouts(p: Problem) -> Iterator[_Layout]:
    """Yield layouts with every number of pipelines, over each class and each two."""
    for b, size in enumerate(p.microbatch_sizes):
        total, rest = divmod(p.global_batch, size)
        for meshes in () if rest else _sequences(p):
            room = [_room(p, m) for m in meshes]
            for num in range(1, min(*room, total) + 1):
                check_deadline()
                stages = [
                    m
                    for m, n in zip(meshes, room, strict=True)
                    for _ in range(n // num)
                ]
                if len(stages) > min(p.num_layers, _MOST_STAGES):
                    continue
                found = _layout(p, b, np.array(stages), _shared(total, num))
                if found is not None:
                    yield found


def _sequences(p: Problem) -> Iterator[tuple[int, ...]]:
    """Yield every mesh, and every two meshes of one shape on two different classes."""
    for first in range(len(p.meshes.first_M)):
        yield (first,)
    for two in permutations(range(len(p.meshes.first_M)), 2):
        one, other = (p.options[p.meshes.first_M[m]] for m in two)
        alike = (one.tensor, one.data) == (other.tensor, other.data)
        if alike and one.device_class != other.device_class:
            yield two


def _room(p: Problem, m: int) -> int:
    """Return how many stages on the mesh fit on the devices of its class."""
    option = p.options[p.meshes.first_M[m]]
    return int(p.devices_C[option.device_class]) // option.num_devices


def _shared(total: int, num: int) -> tuple[int, ...]:
    each, more = divmod(total, num)
    return (each + 1,) * more + (each,) * (num - more)


def _layout(
    p: Problem, b: int, mesh_S: Ints, counts: tuple[int, ...]
) -> _Layout | None:
    """Return the layout whose slowest stage is fastest; None if none fits memory."""
    num_stages, most = len(mesh_S), p.meshes.busy_s_BMFU.shape[2]
    held_S = np.minimum(np.arange(num_stages, 0, -1), min(most, counts[0])) - 1
    busy_s_SU = p.meshes.busy_s_BMFU[b, mesh_S, held_S]
    cuts = balanced_cuts(
        np.where(p.range_IJ >= 0, busy_s_SU[:, p.range_IJ], np.inf)  # no empty stages
    )
    if cuts is None:
        return None
    rows_S = p.range_IJ[cuts[:-1], cuts[1:]]
    seconds_S = busy_s_SU[np.arange(num_stages), rows_S]
    options_S = p.meshes.option_BMFU[b, mesh_S, held_S, rows_S]
    slowest_s = seconds_S.max()
    waiting_s = seconds_S.sum() - slowest_s
    return _Layout(
        promised_s=float(counts[0] * slowest_s + _LEFT * waiting_s),
        microbatch_size=p.microbatch_sizes[b],
        num_microbatches=counts,
        options=tuple(int(o) for o in options_S),
        layers=tuple(pairwise(cuts)),
    )
