# SPDX-License-Identifier: Apache-2.0
"""Timelines as Perfetto / Chrome trace JSON: one process per node, one lane per device.

Owns the file format: under each device come the lanes of what travels from it. Does not
own where the times come from: the runtime measures them
(`hetjax/runtime/execution/tracer.py`), the simulator predicts them (`spans.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hetjax.schedule.programs.action import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one device of a node; times in seconds from any common origin.

    `lane` names a lane beside the device's own: of transfers or of reductions.
    """

    node: str
    device: int
    action: Action
    start_s: float
    end_s: float
    lane: str = ""


def perfetto(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace as a JSON object; open it at ui.perfetto.dev or chrome://tracing."""
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
