# SPDX-License-Identifier: Apache-2.0
"""Slow parts are found, named and measured, on steps whose truth is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hetjax.costs.slowness.detector import Detector
from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.sequential import SHIFT, Cusum, reference
from hetjax.costs.slowness.step_times import Lane, Lanes, StepTimes
from tests.costs.slow_steps import LINK, found, lanes, steps

AT = 101  # the step from which something is slow
PIPELINE = [["l4-0", "l4-1", "a100-0", "a100-1"]]
TWO_PIPELINES = [["l4-0", "a100-0"], ["l4-1", "a100-1"]]
REPLICAS = [["l4-0"], ["l4-1"], ["a100-0"]]
ON_ONE_NODE = [["l4-0", "l4-0", "l4-0", "a100-0"]]
LAYOUTS = [PIPELINE, TWO_PIPELINES, REPLICAS, ON_ONE_NODE]


def one(findings: list[Slowdown]) -> Slowdown:
    assert len(findings) == 1, [*map(str, findings)]
    return findings[0]


@pytest.mark.parametrize("factor", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_node_is_named_within_ten_steps(
    nodes: list[list[str]], factor: float, seed: int
):
    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return factor if node == "l4-0" and step >= AT else 1.0

    # several stages show a batch's variation; otherwise it is noise
    work = 0.02 if nodes is REPLICAS else 0.1
    drawn = steps(nodes, AT + 40, seed=seed, work=work, slow=slow)
    finding = one(found(lanes(nodes), drawn))
    assert (finding.subject.what, finding.subject.name) == ("node", "l4-0")
    assert AT <= finding.step < AT + 10
    assert abs(finding.since - AT) <= 2
    assert finding.factor == pytest.approx(factor, rel=0.1)
    told = f"slow: l4-0 {finding.factor:.1f}x since step {finding.since}, "
    assert str(finding) == f"{told}others as before"


@pytest.mark.parametrize("nodes", [PIPELINE, TWO_PIPELINES, REPLICAS])
def test_what_all_have_in_common_is_no_device(nodes: list[list[str]]):
    def slow(step: int, *_: object) -> float:
        return 1.5 if step >= AT else 1.0

    finding = one(found(lanes(nodes), steps(nodes, AT + 40, seed=0, slow=slow)))
    assert (finding.subject.what, finding.subject.node) == ("run", None)
    assert finding.step < AT + 10 and finding.factor == pytest.approx(1.5, rel=0.1)


def test_batches_of_one_replica_are_told_from_the_devices_they_are_on():
    def slow(step: int, r: int, *_: object) -> float:
        return 1.5 if step >= AT and r == 1 else 1.0

    drawn = steps(TWO_PIPELINES, AT + 40, seed=0, slow=slow)
    finding = one(found(lanes(TWO_PIPELINES), drawn))
    assert finding.subject.what == "batches" and "replica 1" in str(finding)


def test_one_kind_of_action_is_named_as_such():
    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return 1.5 if step >= AT and (s, kind) == (1, "B") else 1.0

    finding = one(found(lanes(PIPELINE), steps(PIPELINE, AT + 40, seed=0, slow=slow)))
    assert (finding.subject.what, finding.subject.name) == ("stage", "B of r0.s1")


def test_a_stage_is_told_from_the_device_that_it_shares():
    there = Lanes(
        tuple(
            Lane(key=(0, s), node=f"n{s % 2}", devices=(0,)) for s in range(4)
        )  # interleaved: two stages on each of two devices
    )
    nodes = [["n0", "n1", "n0", "n1"]]

    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return 1.5 if step >= AT and s == 2 else 1.0

    finding = one(found(there, steps(nodes, AT + 40, seed=0, slow=slow)))
    assert (finding.subject.what, finding.subject.name) == ("stage", "r0.s2")


def test_one_device_of_a_node_is_told_from_the_others():
    there = Lanes(tuple(Lane(key=(0, s), node="n", devices=(s,)) for s in range(4)))

    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return 1.5 if step >= AT and s == 2 else 1.0

    drawn = steps([["n"] * 4], AT + 40, seed=0, slow=slow)
    finding = one(found(there, drawn))
    assert (finding.subject.what, finding.subject.name) == ("device", "n/2")
    assert finding.subject.node == "n"  # the next plan counts its work as slow


def test_a_link_is_found_and_no_device_blamed():
    def slow_link(step: int) -> float:
        return 1.5 if step >= AT else 1.0

    drawn = steps(PIPELINE, AT + 40, seed=0, slow_link=slow_link)
    # in some steps of the drift the link carries nothing large
    used = (replace(t, links={}) if t.step in (103, 105) else t for t in drawn)
    finding = one(found(lanes(PIPELINE), used))
    assert (finding.subject.what, finding.subject.ends) == ("link", LINK)
    assert finding.step < AT + 10 and finding.factor == pytest.approx(1.5, rel=0.1)


def test_one_that_recovers_is_said_to_and_one_that_changes_is_measured_again():
    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        phases = [(AT, 1.0), (161, 2.0), (221, 1.4), (10_000, 1.0)]
        if node != "l4-1":
            return 1.0
        return next(factor for end, factor in phases if step < end) * (step < 281) or 1

    detector, told, factors = Detector(), list[Slowdown](), {}
    detector.begin(lanes(PIPELINE))
    for times in steps(PIPELINE, 340, seed=0, slow=lambda *a: slow(*a)):
        told += detector.add(times)
        factors[times.step] = dict(detector.slow_nodes)
    assert factors[150] == {"l4-1": pytest.approx(2.0, rel=0.05)}
    assert factors[210] == {"l4-1": pytest.approx(1.4, rel=0.05)}
    assert factors[60] == factors[340] == {}
    assert [(f.subject.name, f.is_over) for f in told] == [("l4-1", False)] * 2 + [
        ("l4-1", True)
    ]
    assert told[-1].step < 281 + 10 and str(told[-1]).startswith("recovered: l4-1 ")


@pytest.mark.parametrize(
    "nodes", [PIPELINE, TWO_PIPELINES, [["l4-0", "l4-1"]], [["l4-0"], ["l4-1"]]]
)
def test_another_plan_begins_with_what_is_known_to_be_slow(nodes: list[list[str]]):
    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return 2.0 if node == "l4-1" and AT <= step < 201 else 1.0

    detector, told = Detector(), list[Slowdown]()
    detector.begin(lanes(nodes))
    for times in steps(nodes, 300, seed=0, slow=slow):
        if times.step == 131:
            detector.begin(lanes(nodes))
        told += detector.add(times)
        if 140 <= times.step < 200:  # in the new plan's reference, too
            assert detector.slow_nodes == {"l4-1": pytest.approx(2.0, rel=0.05)}
    assert [finding.is_over for finding in told] == [False, True]
    assert 201 <= told[-1].step < 211 and not detector.slow_nodes


def test_one_slower_than_its_equals_from_the_first_step_on_is_named():
    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return 1.3 if node == "b" else 1.0

    def equal(number: int) -> StepTimes:
        parts = {(0, s, k): 0.1 for s in range(3) for k in ("F", "B")}
        draw = np.random.default_rng(number)
        drawn = {
            (r, s, k): t * math.exp(draw.normal(0, 0.02)) * (1.3 if s == 1 else 1.0)
            for (r, s, k), t in parts.items()
        }
        return StepTimes(step=number, parts=drawn, links={})

    there = lanes([["a", "b", "c"]], work="equal")
    finding = one(found(there, map(equal, range(1, 60))))
    assert finding.subject.name == "b" and finding.step <= 20
    assert finding.factor == pytest.approx(1.3, rel=0.05)
    unlike = lanes([["a", "b", "c"]])  # then it may have more to do
    assert not found(unlike, map(equal, range(1, 60)))


def test_a_node_that_becomes_faster_makes_no_other_slow():
    def slow(step: int, r: int, s: int, kind: str, node: str) -> float:
        return 0.5 if node == "l4-0" and step >= AT else 1.0

    for nodes in (PIPELINE, [["l4-0", "a100-0"]], [["l4-0"], ["a100-0"]]):
        assert not found(lanes(nodes), steps(nodes, 300, seed=0, slow=slow))


def test_steps_that_were_told_in_part_count_for_nothing():
    drawn = [*steps(PIPELINE, 120, seed=0)]
    half = [
        replace(t, parts={p: s for p, s in t.parts.items() if p[1] < 2}) for t in drawn
    ]
    mixed = (half[n] if n % 3 == 0 else whole for n, whole in enumerate(drawn))
    assert not found(lanes(PIPELINE), mixed)
    nothing = (replace(times, parts={}) for times in drawn)
    assert not found(lanes(PIPELINE), nothing)


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_nothing_is_found_in_ten_thousand_steps_of_nothing(noise: float):
    drawn = steps(TWO_PIPELINES, 10_000, seed=7, noise=noise, work=0.1)
    assert not found(lanes(TWO_PIPELINES), drawn)


def test_alarms_are_as_rare_as_the_bound_says_and_sums_of_noise_stay_low():
    # an independent check of the bound: under noise, exp of the sum has mean below 1,
    # so over many starts at most exp(-level) of the sums may reach a level
    draw = np.random.default_rng(0)
    sigma = 0.1
    noise_NK = draw.normal(0.0, sigma, (400, 2000))
    against = replace(
        reference(draw.normal(0.0, sigma, (64, 2000))),
        sigma_K=np.full(2000, sigma),
        center_K=np.zeros(2000),
    )
    one_start = Cusum(2000)
    reached = {2.0: np.zeros(2000, bool), 4.0: np.zeros(2000, bool)}
    for step, row_K in enumerate(noise_NK):
        one_start.add(step, row_K, against, SHIFT)
        for level in reached:
            reached[level] |= one_start.sum_K >= level
    # a sum restarts at most once per step: 400 starts, each below exp(-level)
    for level, mask in reached.items():
        assert mask.mean() <= min(1.0, 400 * math.exp(-level))
    assert reached[4.0].mean() < 0.5


@pytest.mark.parametrize("num_steps", [16, 64])
def test_the_premise_of_the_bound_holds_on_the_reference_itself(num_steps: int):
    # E[exp(g)] <= 1, for steps with tails far heavier than a normal distribution's
    draw = np.random.default_rng(0)
    off_NK = 0.1 * draw.standard_t(1.5, (num_steps, 500))
    found = reference(off_NK)
    off_NK -= np.median(off_NK, axis=0)
    margin_K = 1.25 * found.sigma_K / math.sqrt(num_steps)
    toll = math.log(1 + 0.02 * (math.exp(3) - 1))
    for sign in (1, -1):
        ratio_NK = SHIFT / found.sigma_K**2 * (sign * off_NK - SHIFT / 2 - margin_K)
        gain_NK = np.clip(ratio_NK, -3, 3) - toll
        assert np.exp(gain_NK).mean(axis=0).max() <= 1 + 1e-9
