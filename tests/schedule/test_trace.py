# SPDX-License-Identifier: Apache-2.0
"""A simulated step as spans: complete, and without overlaps in a lane."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, Reduction, Route, StageTimes
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.schedule.programs.action import Op
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.simulator import simulate
from hetjax.schedule.simulation.trace import perfetto, simulated_spans, traced_spans


def plan_of(depths: list[int], num_microbatches: int) -> Plan:
    """Return a plan: replica r has depths[r] stages, each on two devices of node r."""
    replicas = []
    for r, depth in enumerate(depths):
        cuts = [4 * s // depth for s in range(depth + 1)]
        stages = tuple(
            Stage(
                node=f"n{r}",
                devices=(2 * s, 2 * s + 1),
                layers=(cuts[s], cuts[s + 1]),
                launch_ahead=min(depth - s, num_microbatches),
            )
            for s in range(depth)
        )
        replicas.append(
            Replica(num_microbatches=num_microbatches, microbatch_size=1, stages=stages)
        )
    return Plan(
        model="m",
        seq_len=1,
        global_batch=num_microbatches * len(depths),
        replicas=tuple(replicas),
    )


def costs_of(plan: Plan, hop_bytes: float, latency_s: float) -> Costs:
    """Return costs of stages of 3 s, with one trunk for all messages and sums."""
    times = StageTimes(
        forward_s=1.0,
        backward_s=2.0,
        fused_s=3.0,
        input_gradient_s=1.0,
        weight_gradient_s=1.0,
        update_s=0.5,
    )
    hop = Route(trunks=("wire",), latency_s=latency_s)
    keys = [(r, s) for r, s, _ in plan.stages()]
    edges = [
        (a, b) for a in keys for b in keys if a[0] == b[0] and abs(a[1] - b[1]) == 1
    ]
    cuts = {bound for _, _, stage in plan.stages() for bound in stage.layers}
    return Costs(
        times=dict.fromkeys(keys, times),
        trunks={"wire": 1.0},
        routes=dict.fromkeys(edges, hop),
        message_bytes=dict.fromkeys(edges, hop_bytes),
        reductions={
            layers: Reduction(trunk_bytes={"wire": 2.0}, latency_s=latency_s)
            for layers in pairwise(sorted(cuts))
        },
    )


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.25, 4.0]),
    st.sampled_from([0.0, 0.5, 7.0]),
)
def test_no_two_spans_of_a_lane_overlap(depths, num_microbatches, size, latency_s):
    plan = plan_of(depths, num_microbatches)
    costs = costs_of(plan, size, latency_s)
    simulation = simulate(lower(plan), plan, costs)
    lanes = defaultdict(list)
    for span in simulated_spans(simulation, plan, costs):
        assert 0 <= span.start_s <= span.end_s <= simulation.step_time_s + 1e-9
        lanes[span.node, span.device, span.lane].append((span.start_s, span.end_s))
    for found in lanes.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(found)))


def test_every_action_that_takes_time_is_shown_where_it_happens():
    plan = plan_of([2, 1], 3)
    costs = costs_of(plan, 0.25, 0.5)
    spans = simulated_spans(simulate(lower(plan), plan, costs), plan, costs)
    ops = Counter((span.node, span.device, str(span.action.op)) for span in spans)
    for device in (0, 1):
        assert (ops["n0", device, "F"], ops["n0", device, "B"]) == (3, 3)
        assert ops["n0", device + 2, "FB"] == ops["n1", device, "FB"] == 3
    # transfers and sums appear once per stage, beside its first device
    assert (ops["n0", 0, "SEND"], ops["n0", 2, "SEND"]) == (3, 3)
    assert (ops["n0", 1, "SEND"], ops["n1", 0, "SEND"]) == (0, 0)
    assert (ops["n0", 0, "REDUCE"], ops["n0", 2, "REDUCE"]) == (1, 1)
    assert ops["n1", 0, "REDUCE"] == 2


def test_a_transfer_starts_when_its_link_takes_it():
    plan = plan_of([2], 2)
    costs = costs_of(plan, 4.0, 0.0)  # 4 s a message; forwards end at 1 and 2
    spans = simulated_spans(simulate(lower(plan), plan, costs), plan, costs)
    sends = [
        (span.start_s, span.end_s)
        for span in spans
        if span.action.op is Op.SEND and span.action.buffer == "y"
    ]
    # The second message has the wire to itself until 8, then half of it, because a
    # gradient leaves, too.
    assert sends == [(1.0, 5.0), (5.0, 10.0)]


def test_the_trace_has_the_lanes_under_their_devices():
    plan = plan_of([2, 1], 3)
    costs = costs_of(plan, 0.25, 0.0)
    spans = simulated_spans(simulate(lower(plan), plan, costs), plan, costs)
    events = perfetto(spans)["traceEvents"]
    names = {
        event["args"]["name"]: (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name"
    }
    in_order = sorted(names, key=lambda name: names[name])
    assert in_order == [
        "n0/0",
        "n0/0 r0.s0 > s1",
        "n0/0 r0.s0 reduce",
        "n0/1",
        "n0/2",
        "n0/2 r0.s1 > s0",
        "n0/2 r0.s1 reduce",
        "n0/3",
        "n1/0",
        "n1/0 r1.s0 reduce",
        "n1/1",
    ]
    spans_of_lane = Counter((e["pid"], e["tid"]) for e in events if e["ph"] == "X")
    assert spans_of_lane[names["n0/0 r0.s0 > s1"]] == 3


def test_a_trace_that_is_read_back_has_the_spans_that_were_written():
    plan = plan_of([2, 1], 3)
    costs = costs_of(plan, hop_bytes=1.0, latency_s=0.1)
    spans = simulated_spans(simulate(lower(plan), plan, costs), plan, costs)
    found = traced_spans(json.loads(json.dumps(perfetto(spans))))
    told = [(s.node, s.device, s.action, s.lane) for s in spans]
    assert [(s.node, s.device, s.action, s.lane) for s in found] == told
    for was, now in zip(spans, found, strict=True):
        assert now.start_s == pytest.approx(was.start_s)
        assert now.end_s == pytest.approx(was.end_s)


@pytest.mark.parametrize(
    "trace", [[], {}, {"traceEvents": [{"ph": "X"}]}, {"traceEvents": [3]}]
)
def test_what_is_no_trace_of_ours_is_refused(trace: object):
    with pytest.raises(ValueError, match="not a trace of a step"):
        traced_spans(trace)
