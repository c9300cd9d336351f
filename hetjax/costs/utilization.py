# SPDX-License-Identifier: Apache-2.0
"""Computes how well a step uses its devices: FLOPs relative to the peak, and energy.

Recomputation (remat) does not count, nor do devices that the plan leaves idle. Does not
own data sheet figures (`cluster/catalogue.py`) nor any time of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.prices import device_watts
from hetjax.costs.graph.flops import forward_flops
from hetjax.models.model import Model
from hetjax.plans.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """Data sheet figures of a plan's devices; None if those of any are unknown."""

    seconds_at_peak: float | None = None
    watts: float | None = None

    def metrics(self, line: Mapping[str, float]) -> dict[str, float]:
        """Return the derived metrics of a step; `line` has its other metrics."""
        known = dict[str, float]()
        if self.seconds_at_peak is not None:
            known["mfu"] = self.seconds_at_peak / line["step_time_s"]
        if self.watts is not None:
            joules = self.watts * line["step_time_s"]
            known["joules_per_token"] = joules / line["tokens"]
        return known


def device_use(plan: Plan, model: Model, cluster: Cluster) -> DeviceUse:
    """Return the known figures of the devices that the plan uses."""
    return DeviceUse(
        seconds_at_peak=seconds_at_peak(plan, model, cluster),
        watts=board_watts(plan, cluster),
    )


def seconds_at_peak(plan: Plan, model: Model, cluster: Cluster) -> float | None:
    """Return the time of a step at every used device's dense peak; mfu is this / time.

    A step is three forward passes' FLOPs (the backward counts twice). None if a peak is
    unknown: CPUs, and devices that neither catalogue nor cluster describe.
    """
    peaks = [_peak_tflops(cluster.node(name)) for name, _ in plan.used_devices()]
    if 0.0 in peaks:
        return None
    step_flops = 3 * sum(forward_flops(model, plan.seq_len)) * plan.global_batch
    return step_flops / (sum(peaks) * 1e12)


def board_watts(plan: Plan, cluster: Cluster) -> float | None:
    """Return the board power of all used devices; None if any is unknown."""
    used = [device_watts(cluster.node(name)) for name, _ in plan.used_devices()]
    known = [power for power in used if power is not None]
    return sum(known) if len(known) == len(used) else None


def _peak_tflops(node: Node) -> float:
    """Return the dense bf16 peak of one device of the node, 0 if unknown."""
    if node.peak_tflops is not None:
        return node.peak_tflops
    known = catalogue().get(canonical_name(node.device))
    return known.peak_tflops if known and known.name != "cpu" else 0.0
