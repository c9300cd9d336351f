# SPDX-License-Identifier: Apache-2.0
"""Defines the uncertainty of each parameter of the model of time before any run.

Owns these widths and their sources. Does not own their use (`beliefs.py`) nor the
medians, which are the model's own constants (`roofline.py`).
"""

from dataclasses import dataclass
from typing import Final, Literal

from hetjax.cluster.speeds import PARAMETERS
from hetjax.costs.certainty.elasticities import LINK, OVERHEAD, SOFTWARE, Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """The standard deviation of a parameter's logarithm: the part that all kinds of
    device have in common, and each kind's own part."""

    common: float
    own: float


PUBLISHED = "326 published runs of 13 families, none of them ours"
H200 = "an H200 that ran our programs"
SAME_CHIP = f"{H200}, with the same chip"
PROFILE = "a profile"
Lesson = Literal["steps of a run", "steps of earlier runs"]
RUN: Final = "steps of a run"
EARLIER_RUNS: Final = "steps of earlier runs"
NOBODY = "no measurement"

# Fitted to published runs, each family left out in turn (`experiments.accuracy
# .published`): `common` varies between frameworks, `own` between kinds of device. The
# fit for launches is wider: most of those frameworks launch kernels one by one, which
# compiled programs do not.
_WIDTHS = {
    "products": Width(common=0.14, own=0.07),
    "attention": Width(common=0.35, own=0.20),
    "memory": Width(common=0.24, own=0.10),
    "launches": Width(common=0.60, own=0.30),
    "links": Width(common=0.60, own=0.30),
    "network": Width(common=0.50, own=0.20),
    "layers": Width(common=0.03, own=0.03),
    SOFTWARE[1]: Width(common=0.12, own=0.0),
    OVERHEAD[1]: Width(common=0.04, own=0.0),
    LINK: Width(common=0.10, own=0.20),  # of a rate in the cluster file
}
# For the chip that `experiments/results/gpu/` has measured with our programs. Other
# kinds with the same chip have other memory and other power limits.
_MEASURED = {
    "H200": {"products": 0.06, "attention": 0.10, "memory": 0.08, "launches": 0.30},
    "H100": {"products": 0.10, "attention": 0.15, "memory": 0.15, "launches": 0.40},
    "H800": {"products": 0.10, "attention": 0.15, "memory": 0.15, "launches": 0.40},
}
# Kinds that some published run has used; for all others there are only data sheets
_PUBLISHED = ("A100", "H100", "GH200", "V100", "TPU-v5e", "GeForce-RTX-3090")
_PUBLISHED += ("GeForce-RTX-2080", "TITAN-RTX")
_UNSEEN = 2.0  # factor on `own` for other kinds
_GUESS = Width(common=0.0, own=0.7)  # the catalogue's stand-in for any CPU

# The difference between one prediction and one run that no parameter explains: for an
# estimate, and after a run of the same plan. With the overhead's width the first is
# 0.14, as fitted to the published runs.
NOISE, NOISE_OF_RUN = 0.134, 0.03
# What a run's own measurements leave open: the spread of a step's time, and how unlike
# the kinds of action on one device are, compared with the model of time
NOISE_OF_STEP, NOISE_OF_WORK = 0.015, 0.05
# The same after runs of other plans or jobs with the same kinds and software: the
# spread within one family of published runs around its mean. Measured layers leave as
# much open: our predictions with a profile were off by 0.07 (18 plans, root mean
# square, where the profile was measured as the run was). On kinds of which nobody has
# published runs, and without a profile, other plans stay as uncertain as before
# (`experiments.accuracy.calibrated`)
NOISE_OF_EARLIER_RUNS = NOISE_OF_OTHER_PLANS = NOISE_OF_PROFILE = 0.07
NOISES: dict[Lesson, float] = {
    RUN: NOISE_OF_RUN,
    EARLIER_RUNS: NOISE_OF_EARLIER_RUNS,
}


def width(parameter: Parameter) -> Width:
    """Return the width of a parameter."""
    owner, name = parameter
    for kind, measured in _MEASURED.items():
        if owner.startswith(kind) and name in measured:
            return Width(common=0.0, own=measured[name])
    known = _WIDTHS[name]
    if name in ("layers", SOFTWARE[1], OVERHEAD[1], LINK):
        return known
    if owner == "cpu":
        return _GUESS
    if source(owner) == NOBODY:
        return Width(common=known.common, own=_UNSEEN * known.own)
    return known


def is_parameter(parameter: Parameter) -> bool:
    """Return whether the model of time has such a parameter."""
    return parameter in (SOFTWARE, OVERHEAD) or parameter[1] in (*PARAMETERS, LINK)


def source(kind: str) -> str:
    """Return the source of beliefs about a kind of device, as text for people."""
    if kind.startswith(tuple(_MEASURED)):
        return H200 if kind.startswith("H200") else SAME_CHIP
    return PUBLISHED if kind.startswith(_PUBLISHED) else NOBODY
