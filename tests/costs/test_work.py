# SPDX-License-Identifier: Apache-2.0
"""The seconds that stages work show which kind of device is slower than predicted.

Oracles: sums by hand, and the simulator at speeds that the test has chosen.
"""

import math
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.beliefs import prior_beliefs
from hetjax.costs.certainty.calibration import (
    UNCALIBRATED,
    StepCalibration,
    calibration_json,
    parse_calibration,
)
from hetjax.costs.certainty.elasticities import (
    OVERHEAD,
    SOFTWARE,
    Parameter,
    at_speed,
    work_elasticities,
)
from hetjax.costs.certainty.work import measured_parts, predicted_parts, work_of
from hetjax.costs.costs import Costs, StageTimes
from hetjax.costs.plan_costs import costs_of
from hetjax.costs.slowness.step_times import Part, StepTimes
from hetjax.schedule.certainty import certainty_of, learnt
from hetjax.schedule.predicted import predict
from hetjax.schedule.simulated import simulated
from hetjax.stage.partition import tied_holders
from tests.costs.test_certainty import CLUSTER, MODEL, plan

FAST_LINK = replace(
    CLUSTER, links=(replace(CLUSTER.links[0], bandwidth_gbit_per_s=100.0),)
)
FAST, SLOW = "A100-SXM4-80GB", "V100-SXM2-16GB"
PARTS: list[Part] = [(0, 0, "F"), (0, 0, "B"), (0, 1, "FB")]
PARTS += [(0, 0, "UPDATE"), (0, 1, "UPDATE")]


def steps_of(*parts: dict[Part, float]) -> list[StepTimes]:
    return [StepTimes(step=n, parts=each, links={}) for n, each in enumerate(parts)]


def test_work_is_the_sum_over_a_kinds_stages():
    times = StageTimes(forward_s=1.0, backward_s=2.0, fused_s=4.0, update_s=8.0)
    costs = Costs(times={(0, 0): times, (0, 1): times})
    parts = predicted_parts([*PARTS, (0, 0, "I"), (0, 0, "RECV")], plan(10), costs)
    assert parts == {
        (0, 0, "F"): 8.0,  # eight microbatches
        (0, 0, "B"): 16.0,
        (0, 1, "FB"): 32.0,
        (0, 0, "UPDATE"): 8.0,
        (0, 1, "UPDATE"): 8.0,
    }
    nodes = tuple(replace(node, device=SLOW) for node in CLUSTER.nodes)
    alike = Cluster(name="alike", nodes=nodes)
    assert work_of(parts, plan(10), alike)[SLOW, "UPDATE"] == 16.0
    assert work_of(parts, plan(10), CLUSTER) == {
        (FAST, "F"): 8.0,
        (FAST, "B"): 16.0,
        (SLOW, "FB"): 32.0,
        (FAST, "UPDATE"): 8.0,
        (SLOW, "UPDATE"): 8.0,
    }


def test_of_several_steps_the_median_counts_and_parts_of_all():
    both, one = {PARTS[0]: 1.0, PARTS[1]: 5.0}, {PARTS[0]: 9.0}
    steps = steps_of(both, one, {PARTS[0]: 2.0, PARTS[1]: 5.0})
    assert measured_parts(steps) == {PARTS[0]: 2.0}
    assert measured_parts([]) == {}


def costs_on(cut: int, cluster: Cluster) -> Costs:
    return costs_of(plan(cut), MODEL, cluster, halves=False)


def step_s(cut: int, cluster: Cluster) -> float:
    found = plan(cut)
    return simulated(
        found, costs_on(cut, cluster), tied_holders(found, MODEL)
    ).step_time_s


def test_slopes_of_work_are_those_of_each_time_by_itself():
    def work(cluster: Cluster) -> dict[tuple[str, str], float]:
        costs = costs_on(10, cluster)
        return work_of(predicted_parts(PARTS, plan(10), costs), plan(10), cluster)

    found, usual = work_elasticities(work, CLUSTER), work(CLUSTER)
    assert found.keys() == usual.keys()
    for key, slopes in found.items():
        assert {owner for owner, _ in slopes} == {"", key[0]}
        shares = [share for p, share in slopes.items() if p != SOFTWARE]
        assert 0.9 < sum(shares) < 1.01  # latencies have no speed
        for parameter in slopes.keys() - {SOFTWARE}:
            faster = work(at_speed(CLUSTER, parameter, 1.01))[key]
            share = -math.log(faster / usual[key]) / math.log(1.01)
            assert slopes[parameter] == pytest.approx(share, abs=0.1)


def truth(seed: int) -> Cluster:
    """Return the cluster at speeds drawn from the beliefs before any run."""
    beliefs = prior_beliefs(CLUSTER)
    draw = np.random.default_rng(seed)
    logs = draw.multivariate_normal(beliefs.mean_P, beliefs.covariance_PP)
    speeds: dict[Parameter, float] = dict(zip(beliefs.parameters, logs, strict=True))
    common = speeds.pop(SOFTWARE) + speeds.pop(OVERHEAD)
    pairs = [(p, math.exp(log + common)) for p, log in speeds.items()]
    return reduce(lambda c, pair: at_speed(c, *pair), pairs, CLUSTER)


def learn(
    true: Cluster,
    *,
    with_parts: bool,
    overhead: float = 1.0,
    update: float = 1.0,
    seen: StepCalibration = UNCALIBRATED,
) -> StepCalibration:
    """Return what a run on these machines learns from the plan that is cut at 10.

    Its steps take `overhead` times as long as their work explains. Updates measure
    `update` times as long as they take.
    """
    usual = replace(CLUSTER, links=true.links) if true is FAST_LINK else CLUSTER
    found, there = plan(10), seen.applied(usual)
    predicted = predict(found, costs_on(10, there), tied_holders(found, MODEL))
    parts = predicted_parts(PARTS, found, costs_on(10, true)) if with_parts else {}
    parts = {p: s * (update if p[2] == "UPDATE" else 1.0) for p, s in parts.items()}
    return learnt(
        predicted,
        usual,
        lambda cluster: costs_on(10, cluster),
        seen,
        overhead * step_s(10, true),
        parts or None,
    )


def test_another_plan_is_predicted_better_where_the_parts_were_measured():
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(8):
        true = truth(seed)
        for with_parts, found in errors.items():
            there = learn(true, with_parts=with_parts).applied(CLUSTER)
            own = math.log(step_s(10, there) / step_s(10, true))
            assert abs(own) < 0.02
            found.append(abs(math.log(step_s(4, there) / step_s(4, true))))
    assert max(errors[True]) < 0.03
    assert np.median(errors[True]) < np.median(errors[False]) / 2


@pytest.mark.parametrize("update", [0.1, 2.0])
def test_a_short_action_that_measures_oddly_teaches_little(update: float):
    for seed in range(4):
        true = truth(seed)
        there = learn(true, with_parts=True, update=update).applied(CLUSTER)
        for cut in (4, 10):
            assert step_s(cut, there) == pytest.approx(step_s(cut, true), rel=0.06)


def test_a_steps_overhead_is_not_in_its_work():
    first = learn(FAST_LINK, with_parts=True, overhead=1.15)
    assert first.beliefs(FAST_LINK).speed(OVERHEAD).median < 0.97
    again = learn(FAST_LINK, with_parts=True, overhead=1.15, seen=first)
    for seen, later in zip(first.last_step[:-1], again.last_step[:-1], strict=True):
        assert later.measured_s == pytest.approx(later.predicted_s, rel=0.01)
        assert later.predicted_s == pytest.approx(seen.predicted_s, rel=0.01)


def test_work_reads_back_and_is_no_step():
    found = learn(truth(0), with_parts=True)
    assert found.num_steps == 1 and len(found.observations) == 6
    assert {o.what for o in found.last_step[:-1]} == {"work"}
    assert parse_calibration(calibration_json(found)) == found
    again = found.with_step(found.observations[-1])
    assert again.last_step == (found.observations[-1],)


def test_a_plan_that_has_run_is_surer_than_another():
    found = learn(truth(0), with_parts=True)

    def factor(cut: int) -> float:
        costs = costs_on(cut, found.applied(CLUSTER))
        predicted = predict(plan(cut), costs, tied_holders(plan(cut), MODEL))
        on = lambda cluster: costs_on(cut, cluster)  # noqa: E731
        sure = certainty_of(predicted, found.applied(CLUSTER), on, calibration=found)
        return sure.interval.factor

    assert factor(10) < 1.06 < 1.12 < factor(9)
