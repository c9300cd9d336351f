# SPDX-License-Identifier: Apache-2.0
"""Intervals of predictions hold what they promise, and runs narrow them.

Oracles: the simulator at speeds drawn from the beliefs, and least squares with the
prior as extra rows.
"""

import math
import re
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.cluster.speeds import PARAMETERS, Speeds
from hetjax.costs.certainty.beliefs import Beliefs, Observation, prior_beliefs
from hetjax.costs.certainty.calibration import (
    UNCALIBRATED,
    calibration_json,
    parse_calibration,
)
from hetjax.costs.certainty.elasticities import (
    OVERHEAD,
    SOFTWARE,
    Elasticities,
    Parameter,
    at_speed,
    elasticities,
)
from hetjax.costs.certainty.given import check_calibration
from hetjax.costs.certainty.priors import width
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import BadInput
from hetjax.models.named import TypedName, load_named
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.schedule.simulated import simulated
from hetjax.stage.partition import tied_holders

CLUSTER = Cluster(
    name="two",
    nodes=(
        Node(name="fast", device="A100-SXM4-80GB", count=2),
        Node(name="slow", device="V100-SXM2-16GB", count=2, zone="b"),
    ),
    links=(Link(between=("fast", "slow"), bandwidth_gbit_per_s=10.0),),
)
MODEL = load_named(TypedName("gpt2-124m"))
COMMON = (SOFTWARE, OVERHEAD)


def plan(cut: int) -> Plan:
    stages = (
        Stage(
            node="fast",
            devices=(0, 1),
            mesh=StageMesh(tensor=2),
            layers=(0, cut),
            launch_ahead=2,
        ),
        Stage(
            node="slow",
            devices=(0, 1),
            mesh=StageMesh(data=2),
            layers=(cut, 14),
            launch_ahead=1,
        ),
    )
    replica = Replica(num_microbatches=8, microbatch_size=4, stages=stages)
    return Plan(model=MODEL.name, seq_len=512, global_batch=32, replicas=(replica,))


def step_s(cut: int, cluster: Cluster) -> float:
    found = plan(cut)
    costs = costs_of(found, MODEL, cluster, halves=False)
    return simulated(found, costs, tied_holders(found, MODEL)).step_time_s


@cache
def slopes(cut: int) -> Elasticities:
    return elasticities(lambda cluster: step_s(cut, cluster), CLUSTER)


def drawn(beliefs: Beliefs, draw: np.random.Generator) -> dict[Parameter, float]:
    """Return possible true speeds, drawn from the beliefs."""
    logs = draw.multivariate_normal(beliefs.mean_P, beliefs.covariance_PP)
    return dict(zip(beliefs.parameters, map(math.exp, logs), strict=True))


def true_step_s(cut: int, speeds: dict[Parameter, float]) -> float:
    rest = [(p, s) for p, s in speeds.items() if p not in COMMON]
    there = reduce(lambda c, pair: at_speed(c, *pair), rest, CLUSTER)
    return step_s(cut, there) / math.prod(speeds[p] for p in COMMON)


def test_intervals_hold_the_steps_that_the_simulator_finds_at_drawn_speeds():
    beliefs = prior_beliefs(CLUSTER, noise=0.0)
    interval = beliefs.interval(step_s(10, CLUSTER), slopes(10))
    draw = np.random.default_rng(0)
    inside = [true_step_s(10, drawn(beliefs, draw)) in interval for _ in range(200)]
    assert 0.84 <= np.mean(inside) <= 0.97


@pytest.mark.parametrize("cuts", [(8, 10), (6, 12)])
def test_ratios_of_plans_are_known_better_than_either(cuts: tuple[int, int]):
    beliefs = prior_beliefs(CLUSTER, noise=0.0)
    both = [(step_s(cut, CLUSTER), slopes(cut)) for cut in cuts]
    ratio = beliefs.ratio(both[0], both[1])
    assert ratio.factor < beliefs.interval(*both[0]).factor
    draw = np.random.default_rng(1)
    one, other = cuts
    inside = [
        true_step_s(one, speeds) / true_step_s(other, speeds) in ratio
        for speeds in (drawn(beliefs, draw) for _ in range(150))
    ]
    assert 0.84 <= np.mean(inside) <= 0.97
    assert beliefs.ratio(both[0], both[0]).factor == pytest.approx(1.0)


def test_what_was_measured_is_learnt_as_least_squares_learn_it():
    beliefs = prior_beliefs(CLUSTER)
    draw = np.random.default_rng(2)
    seen = [
        Observation(
            measured_s=float(draw.uniform(0.5, 2.0)),
            predicted_s=1.0,
            elasticities={
                p: float(draw.uniform(-0.2, 1.0)) for p in beliefs.parameters
            },
            noise=0.1,
        )
        for _ in range(5)
    ]
    # min over x of |L^-1 x|^2 + |(surprise + slopes x) / noise|^2, L L' the prior
    prior_PP = np.linalg.inv(np.linalg.cholesky(beliefs.covariance_PP))
    slope_NP = np.array([[o.elasticities[p] for p in beliefs.parameters] for o in seen])
    surprise_N = np.log([o.measured_s for o in seen])
    stacked = np.concatenate([prior_PP, slope_NP / 0.1])
    target = np.concatenate([np.zeros(len(beliefs.parameters)), -surprise_N / 0.1])
    best_P = np.linalg.lstsq(stacked, target, rcond=None)[0]
    found = beliefs.observed(seen)
    np.testing.assert_allclose(found.mean_P, best_P, atol=1e-9)
    np.testing.assert_allclose(
        found.covariance_PP, np.linalg.inv(stacked.T @ stacked), atol=1e-9
    )


def test_after_a_run_its_own_step_and_that_of_a_like_plan_are_known():
    prior = prior_beliefs(CLUSTER)
    speeds = drawn(prior, np.random.default_rng(3))
    measured_s = true_step_s(10, speeds)
    beliefs = prior
    for _ in range(3):  # slopes change with speeds: a few Newton steps
        there = beliefs.applied(CLUSTER)
        seen = Observation(
            measured_s=measured_s,
            predicted_s=step_s(10, there),
            elasticities=elasticities(lambda c: step_s(10, c), there),
            noise=0.01,
        )
        beliefs = beliefs.observed([seen])
    there = beliefs.applied(CLUSTER)
    assert step_s(10, there) == pytest.approx(measured_s, rel=0.02)
    left = replace(beliefs, noise=0.02)
    assert left.interval(1.0, slopes(10)).factor < 1.1
    before = abs(math.log(step_s(12, CLUSTER) / true_step_s(12, speeds)))
    after = abs(math.log(step_s(12, there) / true_step_s(12, speeds)))
    assert after < before / 2


@pytest.mark.parametrize("name", [p for p in PARAMETERS if p != "layers"])
def test_faster_never_takes_longer_and_slopes_are_shares_of_the_step(name: str):
    for kind in ("A100-SXM4-80GB", "V100-SXM2-16GB"):
        assert 0 <= slopes(10).get((kind, name), 0.0) <= 1
        faster = at_speed(CLUSTER, (kind, name), 2.0)
        assert step_s(10, faster) <= step_s(10, CLUSTER)


def test_a_step_is_all_shares_together():
    """If all work is twice as fast, latencies aside, a step takes half the time."""
    shares = [v for p, v in slopes(10).items() if p not in COMMON]
    assert sum(shares) == pytest.approx(1.0, abs=0.02)


def test_kinds_that_nobody_measured_are_known_worse():
    seen, unseen = (width((kind, "memory")) for kind in ("A100-SXM4-40GB", "L4"))
    measured = width(("H200", "memory"))
    assert measured.own + measured.common < seen.own + seen.common
    assert seen.own < unseen.own


def test_no_file_says_speeds():
    slow = replace(CLUSTER.nodes[0], speeds=Speeds(memory=0.5))
    cluster = replace(CLUSTER, nodes=(slow, CLUSTER.nodes[1]))
    assert parse_cluster(cluster_toml(cluster)) == CLUSTER
    with pytest.raises(Exception, match="speeds"):
        parse_cluster(cluster_toml(CLUSTER).replace("count", "speeds = 1\ncount", 1))


def observed() -> Observation:
    return Observation(
        measured_s=2.0, predicted_s=1.0, noise=0.03, elasticities=slopes(10)
    )


def test_a_calibration_reads_back_and_counts_on_other_clusters_too():
    calibration = UNCALIBRATED.with_step(observed())
    text = calibration_json(calibration)
    assert parse_calibration(text) == calibration
    alone = Cluster(name="one", nodes=CLUSTER.nodes[:1])
    assert calibration.applied(alone).nodes[0].speeds.products < 1.0
    other = Cluster(name="other", nodes=(Node(name="x", device="L4", count=1),))
    assert calibration.applied(other).nodes[0].speeds.products < 1.0  # the software's
    assert UNCALIBRATED.applied(alone) is alone


def test_files_from_before_work_was_measured_have_steps_and_sums():
    alone = replace(observed(), elasticities={("L4", "links"): 1.0}, what="sum")
    found = UNCALIBRATED.with_step(observed(), [alone])
    text = calibration_json(found)
    old = re.sub(r'"what": "(step|sum)",', "", text)
    assert old != text and parse_calibration(old) == found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 2'),
        ('"what": "step"', '"what": "guess"'),
        ("2.0", "-2.0"),
        ("2.0", "1e400"),
        ('"products"', '"magic"'),
        ('"share": ', '"share": 1e9, "x": '),
        ("[", "{"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(old: str, new: str):
    text = calibration_json(UNCALIBRATED.with_step(observed()))
    assert old in text
    with pytest.raises(BadInput):
        parse_calibration(text.replace(old, new, 1))


@pytest.mark.parametrize("text", ['{"step": 1}\n{"step": 2}', '{"steps": 5}', "words"])
def test_a_file_that_a_user_gives_is_never_to_be_removed(tmp_path: Path, text: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput) as refused:
        check_calibration(path)
    assert str(path) in refused.value.got
    assert refused.value.fix.startswith("give RUN/calibration.json")


def test_a_device_of_ones_own_is_no_link_whatever_its_name():
    own = width(("my-card", "products"))
    assert own == width(("prototype", "products"))
    assert own.own > width(("A100-SXM4-40GB", "products")).own


def test_times_of_a_profile_have_the_software_in_them():
    calibration = UNCALIBRATED.with_step(observed())
    overhead = calibration.beliefs(CLUSTER).speed(OVERHEAD).median
    for node in calibration.applied(CLUSTER).nodes:
        assert node.speeds.layers == pytest.approx(overhead)
        assert node.speeds.products < 0.9 * overhead
