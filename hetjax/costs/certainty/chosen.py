# SPDX-License-Identifier: Apache-2.0
"""Which measurements a prediction learns from.

Owns the choice between what is given and what earlier runs have left. Does not own
either (`given.py`, `kept.py`) nor the run's own file
(`training/layout/plan_choice.py`).
"""

from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.calibration import UNCALIBRATED, StepCalibration
from hetjax.costs.certainty.given import NONE, read_given
from hetjax.costs.certainty.kept import Precisions, read_kept
from hetjax.costs.certainty.sums import observed_ring


def calibration_from(
    given: str | Path | None, cluster: Cluster, precisions: Precisions
) -> StepCalibration:
    """Return what is in a file; what was kept if none is given.

    "none" is nothing. BadInput for a file that cannot be used.
    """
    if given is None:
        return read_kept(cluster, precisions)
    if str(given) == NONE:
        return UNCALIBRATED
    found = read_given(given)
    if isinstance(found, StepCalibration):
        return found
    return StepCalibration((observed_ring(found, cluster),), source=str(given))
