# SPDX-License-Identifier: Apache-2.0
"""Memory in the planner's terms, against that of whole stages (`stage_memory`)."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from hetjax.cluster.catalogue import compiler_of
from hetjax.costs.stage_memory import stage_memory
from hetjax.planner.model.problem import merged_ranges
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.memory_terms import layer_kinds, updating_bytes_OU
from hetjax.planner.model.terms.terms import options_of
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from tests.planner.model.test_terms import request_on


def plan_of(request: PlanRequest, start: int, end: int, tensor: int, copies: int):
    """Return a plan with a stage from `start` to `end`, and the index of that stage."""
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
            request, options, firsts, counts_KU, packed=copies > 1, surely=False
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


@pytest.mark.parametrize("kind", ["A100-SXM4-80GB", "cpu"])
def test_what_an_update_surely_needs_it_needs_whatever_other_replicas_are(
    kind: str,
) -> None:
    """One stage of all layers with data ranks; a second replica is cut between equal
    layers, so that no leaf of both replicas is one array."""
    request = replace(request_on(kind), data_degrees=(1, 2))
    kinds, firsts = layer_kinds(request)
    options, (range_IJ, counts_KU) = options_of(request, (1, 2)), merged_ranges(kinds)
    last = len(request.model.layers)
    needs_OU = updating_bytes_OU(
        request, options, firsts, counts_KU, packed=False, surely=True
    )
    for o, option in enumerate(options):
        if option.num_devices > 2:
            continue
        for cut in range(1, last):
            whole = Replica(
                num_microbatches=2,
                microbatch_size=2,
                stages=(
                    Stage(
                        node=kind.lower(),
                        devices=tuple(range(option.num_devices)),
                        layers=(0, last),
                        mesh=StageMesh(tensor=option.tensor, data=option.data),
                        launch_ahead=1,
                    ),
                ),
            )
            other, _ = plan_of(request, cut, last, 1, 2)
            plan = Plan(
                model=request.model.name,
                seq_len=request.seq_len,
                global_batch=8,
                replicas=(whole, other.replicas[0]),
            )
            needs_bytes = stage_memory(
                request.said(plan),
                request.model,
                (0, 0),
                dtype="bfloat16",
                optimizer=request.optimizer,
                halves=False,
                compiler=compiler_of(kind),
            ).update_bytes
            assert needs_OU[o, range_IJ[0, last]] <= needs_bytes
