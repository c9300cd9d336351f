# SPDX-License-Identifier: Apache-2.0
"""Chooses the measurements from which a prediction learns.

Owns the choice between a given file and the steps of earlier runs, and the choice of
the device speed that a measured ring's rate is compared with. Does not own given files
(`given.py`), kept steps (`kept.py`), the source of a ring's rate
(`costs/measured/nccl_tests.py`), nor the run's own file
(`training/layout/plan_choice.py`).
"""

from dataclasses import replace
from pathlib import Path

from hetjax.cluster.catalogue import canonical_name, catalogue, device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.speeds import AS_MODELLED
from hetjax.costs.certainty.beliefs import Observation
from hetjax.costs.certainty.calibration import UNCALIBRATED, StepCalibration
from hetjax.costs.certainty.given import NONE, read_given
from hetjax.costs.certainty.kept import Precisions, read_kept
from hetjax.costs.certainty.priors import NOISE_OF_RUN
from hetjax.costs.measured.nccl_tests import RingMeasurement
from hetjax.costs.roofline import ring_hop
from hetjax.errors import BadInput

_BYTES = 1e9  # of a message for which latency is negligible


def calibration_from(
    given: str | Path | None, cluster: Cluster, precisions: Precisions
) -> StepCalibration:
    """Return the calibration in the given file; without one, the kept steps.

    "none" gives no calibration. Raises BadInput for a file that cannot be used.
    """
    if given is None:
        return read_kept(cluster, precisions)
    if str(given) == NONE:
        return UNCALIBRATED
    found = read_given(given)
    if isinstance(found, StepCalibration):
        return found
    return StepCalibration((_observed_ring(found, cluster),), source=str(given))


def _observed_ring(ring: RingMeasurement, cluster: Cluster) -> Observation:
    """Return the ring's measured time for a long message, with the predicted time.

    The prediction uses the figures of the cluster, else of the catalogue. Raises
    BadInput for devices that neither describes.
    """
    speed, bytes_per_s = _modelled(ring, cluster)
    return Observation(
        measured_s=_BYTES / ring.bytes_per_s,
        predicted_s=_BYTES / bytes_per_s,
        elasticities={(ring.device, speed): 1.0},
        noise=max(ring.misfit, NOISE_OF_RUN),
        what="sum",
    )


def _modelled(ring: RingMeasurement, cluster: Cluster) -> tuple[str, float]:
    """Return the speed that limits a ring and the rate of its slowest hop.

    That hop is over a host's card or inside the host.
    """
    spec = device_spec(_node(ring, cluster))
    inside = ring_hop(spec).bytes_per_s
    card = spec.network_gbit_per_s * 1e9 / 8
    if ring.num_hosts == 1 or spec.links_span_hosts or inside <= card:
        return "links", inside
    return "network", card


def _node(ring: RingMeasurement, cluster: Cluster) -> Node:
    for node in cluster.nodes:
        if canonical_name(node.device) == ring.device:
            return replace(node, speeds=AS_MODELLED)
    if ring.device not in catalogue():
        kinds = sorted({canonical_name(node.device) for node in cluster.nodes})
        raise BadInput(
            got=f"sums measured on {ring.device}",
            allowed=f"a device of the catalogue, or of the cluster: {', '.join(kinds)}",
            fix="give --calibration the output of a test on these devices",
        )
    return Node(name="measured", device=ring.device, count=ring.num_devices)
