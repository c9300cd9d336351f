# SPDX-License-Identifier: Apache-2.0
"""Builds timelines: spans on lanes, a simulated step as spans, Perfetto's trace file.

Owns the lanes: one per device; next to a stage's first device, one per direction for
its SENDs, and one for its REDUCEs. A transfer starts when its link takes it, not when
it joins the queue. Owns the file format (Perfetto / Chrome JSON: a process per node,
and under each device the lanes of its transfers). Does not own the times: the runtime
measures them (`runtime/execution/tracer.py`), `simulator.py` predicts them; nor the
picture (`report/pictures/timeline.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hetjax.costs.costs import Costs, Route
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, reduce_groups
from hetjax.schedule.programs.action import UNTIED, Action, Op, Tied, parse_program
from hetjax.schedule.simulation.result import Simulation


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one device of a node; times in seconds from any common origin.

    `lane` names a lane of transfers or of reductions; "" is the device's own lane.
    """

    node: str
    device: int
    action: Action
    start_s: float
    end_s: float
    lane: str = ""


def perfetto(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the trace as a JSON object for ui.perfetto.dev or chrome://tracing."""
    spans = list(spans)
    origin_s = min((span.start_s for span in spans), default=0.0)
    nodes = {node: pid for pid, node in enumerate(sorted({s.node for s in spans}))}
    lanes = sorted({(span.node, span.device, span.lane) for span in spans})
    tids = {lane: tid for tid, lane in enumerate(lanes)}  # also their order on screen
    events = [_name("process_name", nodes[node], 0, node) for node in nodes]
    for (node, device, lane), tid in tids.items():
        name = " ".join(filter(None, (f"{node}/{device}", lane)))
        events.append(_name("thread_name", nodes[node], tid, name))
    for span in spans:
        events.append(
            {
                "name": str(span.action),
                "cat": str(span.action.op),
                "ph": "X",
                "pid": nodes[span.node],
                "tid": tids[span.node, span.device, span.lane],
                "ts": (span.start_s - origin_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def traced_spans(trace: Any) -> list[Span]:
    """Return the spans of a trace, to the microsecond; times count from its start.

    Raises ValueError if `perfetto` did not make the trace.
    """
    try:
        events = trace["traceEvents"]
        names = {
            (e["name"], e["pid"], e["tid"]): e["args"]["name"]
            for e in events
            if e["ph"] == "M"
        }
        return [_traced(event, names) for event in events if event["ph"] == "X"]
    except (KeyError, TypeError, AttributeError, BadInput) as error:
        raise ValueError(f"not a trace of a step ({error})") from error


def _traced(event: dict[str, Any], names: dict[Any, str]) -> Span:
    node = names["process_name", event["pid"], 0]
    thread = names["thread_name", event["pid"], event["tid"]]
    device, _, lane = thread.removeprefix(f"{node}/").partition(" ")
    (action,) = parse_program(event["name"])
    start_s = event["ts"] / 1e6
    return Span(node, int(device), action, start_s, start_s + event["dur"] / 1e6, lane)


def simulated_spans(
    simulation: Simulation, plan: Plan, costs: Costs, tied: Tied = UNTIED
) -> list[Span]:
    """Return everything that takes time in a simulated step; lanes never overlap."""
    computed = [
        Span(node, device, timed.action, timed.start_s, timed.end_s)
        for (node, devices), lane in simulation.lanes.items()
        for timed in lane
        for device in devices
    ]
    beside = [*_transfers(simulation, plan, costs), *_sums(simulation, plan, tied)]
    return computed + _apart(span for span in beside if span.end_s > span.start_s)


def _transfers(simulation: Simulation, plan: Plan, costs: Costs) -> Iterator[Span]:
    for edge, (sent_s, arrival_s) in simulation.messages.items():
        (r, s), (_, peer) = edge
        route = costs.routes.get(edge, Route(trunks=()))
        buffer = "y" if peer > s else "dx"
        free_s = 0.0
        for m in sorted(sent_s, key=lambda m: sent_s[m]):
            start_s = max(sent_s[m], free_s)
            if route.trunks:  # messages follow one another, apart from latency
                free_s = arrival_s[m] - route.latency_s
            action = Action(Op.SEND, r, s, m, buffer, peer)
            yield _beside(plan, action, start_s, arrival_s[m], f"r{r}.s{s} > s{peer}")


def _sums(simulation: Simulation, plan: Plan, tied: Tied) -> Iterator[Span]:
    groups = reduce_groups(plan, tied)
    for action, start_s, end_s in simulation.reductions:
        assert action.group is not None
        for r, s in groups[action.group]:
            held = replace(action, replica=r, stage=s)
            yield _beside(plan, held, start_s, end_s, f"r{r}.s{s} reduce")


def _beside(
    plan: Plan, action: Action, start_s: float, end_s: float, lane: str
) -> Span:
    stage = plan.replicas[action.replica].stages[action.stage]
    return Span(stage.node, stage.devices[0], action, start_s, end_s, lane)


def _apart(spans: Iterable[Span]) -> list[Span]:
    """Move spans that overlap others of their lane to second and further lanes."""
    free_s: dict[tuple[str, int, str], list[float]] = {}
    out = []
    for span in sorted(spans, key=lambda span: span.start_s):
        rows = free_s.setdefault((span.node, span.device, span.lane), [])
        row = next((i for i, t in enumerate(rows) if t <= span.start_s), len(rows))
        rows[row : row + 1] = [span.end_s]
        out.append(replace(span, lane=f"{span.lane} {row + 1}") if row else span)
    return out
