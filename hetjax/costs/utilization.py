# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilization: the FLOPs of a step beside the devices' peak.

Recomputation (remat) does not count, nor do devices that the plan leaves idle. Does not
own data sheet figures (`cluster/catalogue.py`) nor any time of a step.
"""

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.graph.flops import forward_flops
from hetjax.models.model import Model
from hetjax.plans.plan import Plan


def seconds_at_peak(plan: Plan, model: Model, cluster: Cluster) -> float | None:
    """Return the time of a step at every used device's dense peak; mfu is this / time.

    A step is three forward passes' FLOPs (the backward counts twice). None where a
    peak is not known: CPUs, and devices that neither catalogue nor cluster describe.
    """
    used = {(x.node, index) for _, _, x in plan.stages() for index in x.devices}
    peaks = [_peak_tflops(cluster.node(name)) for name, _ in used]
    if 0.0 in peaks:
        return None
    step_flops = 3 * sum(forward_flops(model, plan.seq_len)) * plan.global_batch
    return step_flops / (sum(peaks) * 1e12)


def _peak_tflops(node: Node) -> float:
    """Dense bf16 peak of one device of the node, 0 where it is not known."""
    if node.peak_tflops is not None:
        return node.peak_tflops
    known = catalogue().get(canonical_name(node.device))
    return known.peak_tflops if known and known.name != "cpu" else 0.0
