# SPDX-License-Identifier: Apache-2.0
"""What is left of a plan on a changed cluster, cut anew: quick, and seldom the best.

Owns which stages stay where they are, and their shares of the batch. Does not own how
layers are cut over them (`model/cuts.py`), which plan is gone on with
(`replan.py`), nor the search for others (`find.py`).

Letters of array names as in `model/problem.py`; S stages of one pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetjax.planner.model.cuts import balanced_cuts
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.request import Request
from hetjax.planner.model.seating import UnplacedReplica, plan_of, seated
from hetjax.planner.model.terms import search_problem
from hetjax.plans.plan import Plan, Replica, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cut:
    """A pipeline on the seats that are left, and its times."""

    stages: tuple[Stage, ...]
    pipeline: UnplacedReplica
    fill_s: float
    slowest_s: float

    def time_s(self, num_microbatches: int) -> float:
        return self.fill_s + (num_microbatches - 1) * self.slowest_s


def repaired(request: Request, current: Plan) -> Plan | None:
    """Return the plan of the stages that lost no device, with new cuts and shares.

    None if they do not hold the model, or cannot share the batch out exactly.
    """
    left = [(replica, stages_there(request, replica)) for replica in current.replicas]
    meshes = [stage.mesh for _, stages in left for stage in stages]
    if not meshes:
        return None
    used = replace(
        request,
        tensor_degrees=tuple(sorted({mesh.tensor for mesh in meshes})),
        data_degrees=tuple(sorted({mesh.data for mesh in meshes})),
        microbatch_sizes=tuple(sorted({r.microbatch_size for r, _ in left})),
    )
    alone = sum(1 for _, stages in left if stages) == 1
    p = search_problem(used, used.degrees, num_replicas=1 if alone else np.inf)
    cuts = [_cut(request, p, r, stages) for r, stages in left if stages]
    found = [cut for cut in cuts if cut is not None]
    counts = handed_out(
        [0] * len(found),
        [cut.pipeline.microbatch_size for cut in found],
        request.global_batch,
        lambda n, count: found[n].time_s(count),
    )
    if not counts:
        return None
    return plan_of(
        request,
        [
            seated(
                replace(cut.pipeline, num_microbatches=count),
                [(stage.node, stage.devices) for stage in cut.stages],
            )
            for cut, count in zip(found, counts, strict=True)
            if count
        ],
    )


def stages_there(request: Request, replica: Replica) -> tuple[Stage, ...]:
    """Return the replica's stages whose devices are all there."""
    counts = {node.name: node.count for node in request.cluster.nodes}
    return tuple(s for s in replica.stages if max(s.devices) < counts.get(s.node, 0))


def _cut(
    request: Request, p: Problem, replica: Replica, stages: tuple[Stage, ...]
) -> _Cut | None:
    """Cut the layers so that the slowest stage is as fast as can be; None if no cut
    fits into memory."""
    class_of = {n.name: c for c, k in enumerate(request.classes) for n in k.nodes}
    b = p.microbatch_sizes.index(replica.microbatch_size)
    options = [
        np.array(
            [
                n
                for n, o in enumerate(p.options)
                if o.device_class == class_of[stage.node]
                and (o.tensor, o.data) == (stage.mesh.tensor, stage.mesh.data)
            ]
        )
        for stage in stages
    ]
    times = [_times(p, b, o, len(stages) - s) for s, o in enumerate(options)]
    cuts = balanced_cuts(np.stack([seconds_IJ for seconds_IJ, _ in times]))
    if cuts is None:
        return None
    ranges = list(zip(cuts, cuts[1:], strict=False))
    seconds = [times[s][0][at] for s, at in enumerate(ranges)]
    chosen = [int(times[s][1][at]) for s, at in enumerate(ranges)]
    return _Cut(
        stages=stages,
        pipeline=UnplacedReplica(
            num_microbatches=1,
            microbatch_size=replica.microbatch_size,
            stages=tuple(
                (p.options[o], at) for o, at in zip(chosen, ranges, strict=True)
            ),
        ),
        fill_s=float(sum(seconds)),
        slowest_s=float(max(seconds)),
    )


def _times(p: Problem, b: int, options_O: Ints, ahead: int) -> tuple[Floats, Ints]:
    """By layers, what a stage takes at best under some option, and under which."""
    rows_IJ = np.maximum(p.range_IJ, 0)
    seconds_OIJ = p.busy_s_BOU[b, options_O][:, rows_IJ]
    held_OIJ = p.most_in_flight_BOU[b, options_O][:, rows_IJ]
    fits_OIJ = (held_OIJ >= ahead) & (p.range_IJ >= 0) & ~np.isnan(seconds_OIJ)
    seconds_OIJ = np.where(fits_OIJ, seconds_OIJ, np.inf)
    return seconds_OIJ.min(axis=0), options_O[seconds_OIJ.argmin(axis=0)]


def handed_out(
    counts: Sequence[int],
    sizes: Sequence[int],
    num_sequences: int,
    done_s: Callable[[int, int], float],
) -> list[int]:
    """Add microbatches of each pipeline's size, one after the other to who is done
    first: `done_s` of pipeline and count. Empty if they do not add up."""
    counts, left = list(counts), num_sequences
    while left > 0:
        fits = [n for n, size in enumerate(sizes) if size <= left]
        if not fits:
            return []
        n = min(fits, key=lambda n: done_s(n, counts[n] + 1))
        counts[n] += 1
        left -= sizes[n]
    return counts
