# SPDX-License-Identifier: Apache-2.0
"""Plans of one pipeline, and their costs in plain numbers, for schedule tests."""

from collections.abc import Sequence

from hetjax.costs.costs import Costs, Route, StageTimes
from hetjax.plans.plan import Plan, Replica, Stage


def pipeline_plan(
    launch_ahead: Sequence[int],
    num_microbatches: int,
    schedule: str = "1f1b",
    num_lanes: int | None = None,
) -> Plan:
    """Return one stage per layer, and one node `n<lane>` with one device per lane."""
    lanes = num_lanes or len(launch_ahead)
    stages = tuple(
        Stage(node=f"n{s % lanes}", devices=(0,), layers=(s, s + 1), launch_ahead=ahead)
        for s, ahead in enumerate(launch_ahead)
    )
    replica = Replica(
        num_microbatches=num_microbatches, microbatch_size=1, stages=stages
    )
    return Plan(
        model="m",
        seq_len=8,
        global_batch=num_microbatches,
        schedule=schedule,
        replicas=(replica,),
    )


def pipeline_costs(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
    weight_share: float = 0.5,
) -> Costs:
    """Return costs in which each hop has its own link, with one trunk per direction.

    Links have no latency.
    """
    num_stages = len(forward_s)
    times = {
        (0, s): StageTimes(
            forward_s=f,
            backward_s=b,
            fused_s=f + b,
            input_gradient_s=b * (1 - weight_share),
            weight_gradient_s=b * weight_share,
        )
        for s, (f, b) in enumerate(zip(forward_s, backward_s, strict=True))
    }
    edges = {
        ((0, s), (0, t)): hop_s[min(s, t)]
        for s in range(num_stages)
        for t in (s - 1, s + 1)
        if 0 <= t < num_stages
    }
    return Costs(
        times=times,
        trunks={f"{s}>{t}": 1.0 for (_, s), (_, t) in edges},
        routes={
            ((0, s), (0, t)): Route(trunks=(f"{s}>{t}",)) for (_, s), (_, t) in edges
        },
        message_bytes=edges,
    )
