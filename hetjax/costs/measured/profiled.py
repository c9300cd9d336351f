# SPDX-License-Identifier: Apache-2.0
"""A stage's times from a measured profile.

Owns how the times of layers add up to those of a stage's programs. Does not own the
profile (`profile.py`) nor estimates for layers that nobody measured.
"""

from collections.abc import Iterable
from math import fsum

from hetjax.costs.costs import StageTimes
from hetjax.costs.measured.profile import Measurement, Profile, measured
from hetjax.plans.plan import Stage


def profiled_times(
    profile: Profile,
    stage: Stage,
    *,
    device: str,
    microbatch_size: int,
    shared: bool = False,
) -> StageTimes:
    """Return the stage's seconds by action: the sum over its layers, plus one program.

    `microbatch_size` is the replica's, before the split over `data`. A backward that
    was not measured in halves is cut into equal ones. Layers are `shared` if several
    replicas hold them: their updates take other programs.
    """
    layers = _layers(profile, stage, device, microbatch_size)

    def program_s(seconds: Iterable[float]) -> float:
        return fsum(seconds) + profile.program_s

    return StageTimes(
        forward_s=program_s(m.forward_s for m in layers),
        backward_s=program_s(m.backward_s for m in layers),
        fused_s=program_s(m.forward_s + m.backward_s for m in layers),
        input_gradient_s=program_s(_half(m, m.input_gradient_s) for m in layers),
        weight_gradient_s=program_s(_half(m, m.weight_gradient_s) for m in layers),
        update_s=program_s(_update_s(m, shared) for m in layers),
    )


def has_halves(
    profile: Profile, stage: Stage, *, device: str, microbatch_size: int
) -> bool:
    """Say whether the halves of all the stage's backwards were measured."""
    layers = _layers(profile, stage, device, microbatch_size)
    return all(m.input_gradient_s is not None for m in layers)


def _layers(
    profile: Profile, stage: Stage, device: str, microbatch_size: int
) -> list[Measurement]:
    lo, hi = stage.layers
    return [
        measured(
            profile,
            device=device,
            kind=kind,
            tensor=stage.mesh.tensor,
            data=stage.mesh.data,
            microbatch_size=microbatch_size // stage.mesh.data,
            remat=stage.remat,
        )
        for kind in profile.layers[lo:hi]
    ]


def _update_s(layer: Measurement, shared: bool) -> float:
    if shared and layer.shared_update_s is not None:
        return layer.shared_update_s
    return layer.update_s


def _half(layer: Measurement, seconds: float | None) -> float:
    return layer.backward_s / 2 if seconds is None else seconds
