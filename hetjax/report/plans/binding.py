# SPDX-License-Identifier: Apache-2.0
"""Finds what binds (limits) a predicted step: compute, a link, or pipeline fill.

Owns the measure and its words. Does not own the simulation (`schedule/`).
"""

from collections import defaultdict
from dataclasses import dataclass

from hetjax.report.prediction import lane_name
from hetjax.schedule.predicted import Predicted

_TIGHT = 0.95  # of a device's memory: more than this is hardly by chance
_BINDS = 0.7  # of the step: below that, neither the busiest device nor a link binds
_FULL = 0.5  # of a link's capacity: it binds from here if devices wait for messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The busiest devices, the fullest link, and the devices short of memory.

    `busy_share` and `waiting_share` (for messages) are shares of the step, on the
    busiest devices. `link_share` is the traffic of the link as a share of its capacity.
    """

    busiest: str
    busy_share: float
    waiting_share: float
    link: str | None
    link_share: float
    tight_devices: tuple[str, ...]
    num_devices: int

    @property
    def what(self) -> str:
        """What binds, in a word: compute, link, messages, or fill (of the pipeline)."""
        if self.busy_share >= max(_BINDS, self.link_share):
            return "compute"
        waiting = self.waiting_share > 1 - self.busy_share - self.waiting_share
        if self.link_share >= (_FULL if waiting else _BINDS):
            return "link"
        return "messages" if waiting else "fill"


def binding(predicted: Predicted) -> Binding:
    """Return what binds in the simulated step."""
    simulation = predicted.simulation
    lanes, step_s = simulation.shares, simulation.step_time_s
    busiest = max(lanes, key=lambda lane: lanes[lane].busy_s)
    shares = _link_shares(predicted)
    link = max(shares, key=lambda trunk: shares[trunk], default=None)
    tight = tuple(
        device
        for device, use in predicted.memory.items()
        if use.total_bytes > _TIGHT * predicted.capacity_bytes[device]
    )
    return Binding(
        busiest=lane_name(busiest),
        busy_share=lanes[busiest].busy_s / step_s,
        waiting_share=lanes[busiest].waiting_s / step_s,
        link=link,
        link_share=shares[link] if link else 0.0,
        tight_devices=tight,
        num_devices=len(predicted.memory),
    )


def largest_term(found: Binding) -> str:
    """Return what takes most of the step on its busiest devices."""
    rest = 1 - found.busy_share - found.waiting_share
    terms = {
        "computing": found.busy_share,
        "waiting for messages": found.waiting_share,
        "filling and draining the pipeline": rest,
    }
    what = max(terms, key=lambda term: terms[term])
    return f"largest term: {what}, {terms[what]:.1%} of the step on {found.busiest}"


def binding_line(found: Binding) -> str:
    """Return what binds, in a line."""
    busy = (
        f"{found.busiest} is busy {found.busy_share:.1%} of the step and waits for "
        f"messages {found.waiting_share:.1%}"
    )
    link = f"link {found.link} carries {found.link_share:.1%} of its capacity"
    tight = (
        f"{len(found.tight_devices)} of {found.num_devices} devices are within 5 % of "
        "their memory limit"
    )
    parts = [busy, link] if found.link else [busy]
    if found.what == "link":
        parts.reverse()
    first = {
        "compute": "compute binds",
        "link": "a link binds",
        "messages": "waiting for messages binds, though no link is full all the time",
        "fill": "filling and draining pipelines binds (more microbatches would help)",
    }[found.what]
    return f"{first}: {', '.join(parts)}; {tight}"


def _link_shares(predicted: Predicted) -> dict[str, float]:
    """Return the bytes of a step over every trunk, as a share of its capacity."""
    costs, simulation = predicted.costs, predicted.simulation
    sent: defaultdict[str, float] = defaultdict(float)
    for edge, (sent_s, _) in simulation.messages.items():
        route = costs.routes.get(edge)
        for trunk in route.trunks if route else ():
            sent[trunk] += costs.message_bytes.get(edge, 0.0) * len(sent_s)
    for reduction in costs.reductions.values():
        for trunk, size in reduction.trunk_bytes.items():
            sent[trunk] += size
    return {
        trunk: size / costs.trunks[trunk] / simulation.step_time_s
        for trunk, size in sent.items()
    }
