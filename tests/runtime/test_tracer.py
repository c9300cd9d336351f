# SPDX-License-Identifier: Apache-2.0
"""A measured step as a Perfetto trace: one lane per device, without overlaps."""

import optax
import pytest

from hetjax.runtime.execution.tracer import Timeline
from hetjax.schedule.simulation.trace import perfetto
from tests.runtime.oracle import random_batch
from tests.runtime.test_update import MODEL, PLAN, runtime_of

pytestmark = pytest.mark.usefixtures("quick_compiling")


def test_a_trace_has_every_pass_of_every_microbatch_on_every_device():
    runtime = runtime_of(optax.sgd(0.1))
    runtime.initialise(0)
    timeline = Timeline(PLAN)
    runtime.step(0, random_batch(PLAN, MODEL.vocab_size, 0), timeline)
    events = perfetto(timeline.spans())["traceEvents"]
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert sorted(lanes.values()) == ["a/0", "a/1", "b/0", "b/1", "b/2", "b/3"]
    spans: dict[str, list[dict]] = {name: [] for name in lanes.values()}
    for event in events:
        if event["ph"] == "X":
            spans[lanes[event["pid"], event["tid"]]].append(event)
    passes = {
        lane: [e["name"] for e in found if e["cat"] in ("F", "B", "FB")]
        for lane, found in spans.items()
    }
    forward_first = ["r0.s0.F0", "r0.s0.F1", "r0.s0.B0", "r0.s0.F2", "r0.s0.B1"]
    assert passes["a/0"] == [*forward_first, "r0.s0.B2"]
    assert passes["a/1"] == [f"r0.s1.FB{m}" for m in range(3)]
    assert all(passes[f"b/{d}"] == ["r1.s0.FB0"] for d in range(4))
    for found in spans.values():
        ends = [event["ts"] + event["dur"] for event in found]
        starts = [event["ts"] for event in found]
        gaps = zip(ends, starts[1:], strict=False)
        assert all(end <= start + 1e-3 for end, start in gaps)
