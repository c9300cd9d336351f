# SPDX-License-Identifier: Apache-2.0
"""A simulated step as spans on lanes: what the trace file and the picture show.

Owns the lanes: one per device; beside the first device of a stage one for what it
sends in each direction, and one for the reductions that it takes part in. A transfer
is shown from when its link takes it, not from when it joined the queue. Does not own
the times (`simulator.py`) nor what becomes of spans (`trace.py`, `report/timeline.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hetjax.costs.costs import Costs, Route
from hetjax.plans.plan import Plan, Stage
from hetjax.schedule.programs.action import UNTIED, Action, Op, StageKey, Tied
from hetjax.schedule.programs.groups import reduce_groups
from hetjax.schedule.simulation.result import Simulation
from hetjax.schedule.simulation.trace import Span


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
            if route.trunks:  # messages go one after the other, latency not counted
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
    stage = _stage(plan, action.key)
    return Span(stage.node, stage.devices[0], action, start_s, end_s, lane)


def _stage(plan: Plan, key: StageKey) -> Stage:
    return plan.replicas[key[0]].stages[key[1]]


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
