# SPDX-License-Identifier: Apache-2.0
"""Memory in the planner's terms, against that of whole stages (`stage_memory`)."""

from itertools import combinations, product

import pytest

from hetjax.cluster.catalogue import compiler_of
from hetjax.costs.stage_memory import stage_memory
from hetjax.planner.model.memory_terms import layer_kinds, updating_bytes_OU
from hetjax.planner.model.problem import merged_ranges
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms import options_of
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from tests.planner.model.test_terms import request_on


def plan_of(request: PlanRequest, start: int, end: int, tensor: int, copies: int):
    """Replicas of which the stage from `start` to `end` is one."""
    kind = request.cluster.nodes[0].device
    last = len(request.model.layers)
    cuts = sorted({0, start, end, last})
    devices = tuple(range(tensor))
    replica = Replica(
        num_microbatches=8 // copies,
        microbatch_size=1,
        stages=tuple(
            Stage(
                node=kind.lower(),
                devices=devices,
                layers=(a, b),
                mesh=StageMesh(tensor=tensor),
                launch_ahead=1,
            )
            for a, b in zip(cuts, cuts[1:], strict=False)
        ),
    )
    plan = Plan(
        model=request.model.name,
        seq_len=request.seq_len,
        global_batch=8,
        replicas=(replica,) * copies,
    )
    return request.said(plan), cuts.index(start)


@pytest.mark.parametrize("kind", ["A100-SXM4-80GB", "TPU-v5e", "MI300X", "cpu"])
def test_what_an_update_needs_is_known_for_every_stage(kind: str) -> None:
    request = request_on(kind)
    kinds, firsts = layer_kinds(request)
    options, (range_IJ, counts_KU) = options_of(request, (1, 2)), merged_ranges(kinds)
    for copies, (start, end) in product(
        (1, 2), combinations(range(len(request.model.layers) + 1), 2)
    ):
        row = range_IJ[start, end]
        needs_OU = updating_bytes_OU(
            request, options, firsts, counts_KU, packed=copies > 1, borrowed=True
        )
        for o, option in enumerate(options):
            plan, s = plan_of(request, start, end, option.tensor, copies)
            needs_bytes = stage_memory(
                plan,
                request.model,
                (0, s),
                dtype="bfloat16",
                optimizer=request.optimizer,
                halves=False,
                compiler=compiler_of(kind),
            ).update_bytes
            assert needs_OU[o, row] == needs_bytes
