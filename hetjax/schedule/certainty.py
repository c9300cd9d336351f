# SPDX-License-Identifier: Apache-2.0
"""Computes the interval of a predicted step time, and the sources of the prediction.

Owns the simulations at other speeds that an interval needs, and what a measured step
and the work in it teach. Does not own the arithmetic (`costs/certainty/`) nor the words
(`report/`).
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from time import process_time

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.costs.certainty.beliefs import Beliefs, CredibleInterval, Observation
from hetjax.costs.certainty.calibration import UNCALIBRATED, StepCalibration
from hetjax.costs.certainty.elasticities import (
    OVERHEAD,
    Elasticities,
    Work,
    elasticities,
    work_elasticities,
)
from hetjax.costs.certainty.priors import (
    NOISE,
    NOISE_OF_PROFILE,
    NOISE_OF_STEP,
    NOISE_OF_WORK,
    PROFILE,
    source,
)
from hetjax.costs.certainty.work import predicted_parts, work_of
from hetjax.costs.costs import Costs
from hetjax.costs.slowness.step_times import Part
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import plan_json
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulated import simulated

_MOST_NEWTON, _NEAR = 6, 0.01  # steps of Newton's method, and its tolerance
_LONG_S = 0.1  # of CPU for one prediction: above that, all kinds vary together

# returns the costs of the plan on the same machines at other speeds
CostsOn = Callable[[Cluster], Costs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Certainty:
    """The interval of a predicted step time. `basis` names the source of each kind's
    speeds, `calibration` has the steps from which the speeds were learnt."""

    interval: CredibleInterval
    slopes: Elasticities
    beliefs: Beliefs
    basis: dict[str, str]
    calibration: StepCalibration = UNCALIBRATED

    def ratio(self, other: "Certainty") -> CredibleInterval:
        """Return the interval of this step time over another's, on the same cluster."""
        return self.beliefs.ratio(
            (self.interval.median, self.slopes),
            (other.interval.median, other.slopes),
        )


def certainty_of(
    predicted: Predicted,
    cluster: Cluster,
    costs_on: CostsOn,
    *,
    measured: Set[str] = frozenset(),
    calibration: StepCalibration = UNCALIBRATED,
) -> Certainty:
    """Return a prediction's certainty; `measured` are the kinds of device in a profile.

    `costs_on` returns the plan's costs on a cluster of the plan's nodes. `cluster` is
    at the speeds that the `calibration` teaches. Beliefs cover the whole cluster, so
    that plans on other nodes can be compared.
    """
    plan, tied = predicted.plan, predicted.tied
    used = part_of(cluster, plan.nodes)
    kinds = dict.fromkeys(canonical_name(node.device) for node in used.nodes)

    def predict(there: Cluster) -> float:
        return simulated(plan, costs_on(there), tied).step_time_s

    started_s = process_time()
    predict(used)
    is_long = process_time() - started_s > _LONG_S
    slopes = elasticities(predict, used, together=is_long and len(kinds) > 1)
    noise = NOISE_OF_PROFILE if measured >= kinds.keys() else NOISE
    beliefs = calibration.beliefs(cluster, noise, plan_digest(plan))
    return Certainty(
        interval=beliefs.interval(predicted.simulation.step_time_s, slopes),
        slopes=slopes,
        beliefs=beliefs,
        basis={kind: _basis(kind, calibration, measured) for kind in kinds},
        calibration=calibration,
    )


def _basis(kind: str, calibration: StepCalibration, measured: Set[str]) -> str:
    """Return the sources of a kind's speeds as text, the best first."""
    before = PROFILE if kind in measured else source(kind)
    if kind not in calibration.kinds():
        return before
    return f"{calibration.lesson}, before that {before}"


def learnt(
    predicted: Predicted,
    cluster: Cluster,
    costs_on: CostsOn,
    seen: StepCalibration,
    measured_s: float,
    parts: Mapping[Part, float] | None = None,
) -> StepCalibration:
    """Return the steps in `seen` and a step of this plan that took `measured_s`.

    `parts` are the measured seconds of its stages. Slopes change with speeds, so the
    step is learnt by Newton's method: it is predicted again at the speeds learnt so
    far, until the prediction equals the measured time or changes no more.
    """
    found, plan, tied, last_s = seen, predicted.plan, predicted.tied, math.inf
    digest = plan_digest(plan)
    for _ in range(_MOST_NEWTON):
        there = found.applied(cluster)
        used = part_of(there, plan.nodes)
        costs = costs_on(used)
        now = replace(predicted, simulation=simulated(plan, costs, tied))
        sure = certainty_of(now, there, costs_on, calibration=found)
        beliefs, median_s = sure.beliefs, sure.interval.median
        step = _as_modelled(beliefs, measured_s, median_s, sure.slopes, NOISE_OF_STEP)
        work = _work(plan, used, costs, costs_on, beliefs, parts) if parts else ()
        found = seen.with_step(replace(step, plan=digest), work)
        if min(abs(math.log(s / median_s)) for s in (measured_s, last_s)) < _NEAR:
            break
        last_s = median_s
    return found


def plan_digest(plan: Plan) -> str:
    """Return a digest that identifies a plan in records of its steps."""
    text = plan_json(replace(plan, predicted=None))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _work(
    plan: Plan,
    used: Cluster,
    costs: Costs,
    costs_on: CostsOn,
    beliefs: Beliefs,
    parts: Mapping[Part, float],
) -> list[Observation]:
    """Return the measured work of each kind of device, by kind of action.

    `costs` are the plan's on the nodes that it has `used`. An action that takes a small
    share of the device's work, as measured or as predicted, tells little of its speed:
    its noise is larger by the root of that share, as if only parts were observed.
    """

    def predict(there: Cluster) -> dict[Work, float]:
        return work_of(predicted_parts(parts, plan, costs_on(there)), plan, there)

    found = predicted_parts(parts, plan, costs)
    measured = work_of({part: parts[part] for part in found}, plan, used)
    predicted, slopes = work_of(found, plan, used), work_elasticities(predict, used)
    shares = _shares(measured), _shares(predicted)
    noise = {w: NOISE_OF_WORK / math.sqrt(min(s[w] for s in shares)) for w in measured}
    return [
        replace(
            _as_modelled(beliefs, s, predicted[w], slopes[w], noise[w]), what="work"
        )
        for w, s in measured.items()
    ]


def _shares(work: Mapping[Work, float]) -> dict[Work, float]:
    """Return the share of each kind of action in all work of its kind of device."""
    total_s: dict[str, float] = {}
    for (device, _), seconds in work.items():
        total_s[device] = total_s.get(device, 0.0) + seconds
    return {w: seconds / total_s[w[0]] for w, seconds in work.items()}


def _as_modelled(
    beliefs: Beliefs,
    measured_s: float,
    predicted_s: float,
    slopes: Elasticities,
    noise: float,
) -> Observation:
    """Return a measured time with its prediction, moved along its slopes to speeds as
    modelled, so that times predicted at different speeds can be combined.

    `predicted_s` was predicted at the means of the beliefs, where all work takes longer
    by a step's overhead.
    """
    means = dict(zip(beliefs.parameters, beliefs.mean_P, strict=True))
    back = sum(slope * means[p] for p, slope in {**slopes, OVERHEAD: 1.0}.items())
    return Observation(
        measured_s=measured_s,
        predicted_s=predicted_s * math.exp(back),
        elasticities=slopes,
        noise=noise,
    )
