# SPDX-License-Identifier: Apache-2.0
"""How much surer a profile makes predictions.

Owns the step that is predicted with and without it, one of one device of each kind, and
the words. Does not own the interval (`schedule/certainty.py`).
"""

from collections.abc import Iterator
from pathlib import Path

from hetjax.api.simulating import simulate_plan
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import Measurement, Profile
from hetjax.errors import BadInput
from hetjax.models.model import Model, tensor_sizes
from hetjax.plans.even import even_plan

_ROOMY_GIB = 2.0**20  # a step is predicted though the whole model may not fit


def narrowing_lines(profile: Profile, path: Path, model: Model) -> Iterator[str]:
    """Yield a line for each kind of device that the catalogue, or who made the cluster
    file, describes: within which factor nine of ten steps are of their prediction."""
    for kind in sorted(profile.devices):
        first = next(m for m in profile.measurements if m.device == kind)
        try:
            factor, before = (
                _factor(first, profile, model, file) for file in (path, None)
            )
        except BadInput:  # nobody describes it, so that nothing is predicted without
            continue
        yield (
            f"how sure: 90% of steps on one {kind} within a factor of {factor:.2f} of "
            f"their prediction with this profile, {before:.2f} without"
        )


def _factor(
    first: Measurement, profile: Profile, model: Model, file: Path | None
) -> float:
    """The factor for a step of one microbatch on as many devices as it was timed on."""
    node = Node(
        name="alone", device=first.device, count=first.tensor, memory_gib=_ROOMY_GIB
    )
    cluster = Cluster(name="alone", nodes=(node,))
    plan = even_plan(
        cluster,
        model=model.name,
        num_layers=len(model.layers),
        seq_len=profile.seq_len,
        global_batch=first.microbatch_size,
        microbatch_size=first.microbatch_size,
        tensor=first.tensor,
        tensor_sizes=tensor_sizes(model),
        remat=first.remat,
    )
    step = simulate_plan(
        plan,
        model=model,
        cluster=cluster,
        profile=file,
        calibration="none",
        dtype=profile.dtype,
        quiet=True,
    )
    assert step.certainty is not None
    return step.certainty.interval.factor
