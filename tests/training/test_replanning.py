# SPDX-License-Identifier: Apache-2.0
"""A run that slows down weighs another plan: it reports it, or moves once."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import hetjax
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import parse_cluster
from hetjax.costs.certainty.beliefs import lognormal
from hetjax.costs.slowness.findings import Slowdown, Subject
from hetjax.costs.slowness.known import Slowness, slowness
from hetjax.costs.slowness.step_times import StepTimes
from hetjax.models.named import TypedName, load_named
from hetjax.plans.plan import Plan, Replica
from hetjax.plans.plan_files import parse_plan, read_plan
from hetjax.runtime.control.step_timing import StepTiming
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main
from hetjax.training.observers.slow_devices import SlowDevices
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.recovered import Recovered
from hetjax.training.replanning.outcomes import MoveMeasured, Outcome, PlanWeighed
from hetjax.training.replanning.replanning import Replanning
from hetjax.training.replanning.weighing import Errors, Weighed, weigh
from hetjax.training.replanning.weighing_process import WeighingProcess
from hetjax.training.session import run
from hetjax.training.settings.config import EvaluationConfig
from hetjax.training.settings.presets import preset
from tests.training.pair import (
    ONE_REPLICA,
    SEQ_LEN,
    TWO_NODES,
    TWO_REPLICAS,
    training,
)
from tests.training.small import (
    MODEL,
    events,
    losses,
    plan,
    small_preset,
    stage,
)
from tests.training.test_workers import losses as worker_losses

TINY = load_named(TypedName("tiny"))
PAIR = parse_cluster(TWO_NODES)
OTHER = replace(TWO_REPLICAS, replicas=TWO_REPLICAS.replicas[:1])


class Answers:
    """A stand-in for weighing that answers after `after` polls, always the same."""

    def __init__(self, gain: float = 1.5, after: int = 2) -> None:
        self.gain, self.after = gain, after
        self.asked = list[tuple[Plan, Slowness, Errors]]()
        self._looks, self._to = 0, OTHER

    def __call__(
        self,
        cluster: Cluster,
        plan: Plan,
        slow: Slowness,
        errors: Errors,
        horizon_s: float,
    ) -> "Answers":
        self.asked.append((plan, slow, dict(errors)))
        self._looks, self._to = 0, OTHER if plan == TWO_REPLICAS else TWO_REPLICAS
        return self

    def found(self) -> Weighed | None:
        self._looks += 1
        if self._looks < self.after:
            return None
        return Weighed(
            plan=self._to,
            gain=lognormal(self.gain, 0.05**2),
            present_s=1.5,
            other_s=1.0,
            move_s=0.0,
        )

    def close(self) -> None:
        self._looks = -(10**9)


def slow_since(step: int, what: str = "node", is_over: bool = False) -> Slowdown:
    node = "left" if what == "node" else None
    subject = Subject(what="node" if node else "batches", name="left", node=node)
    return Slowdown(
        subject=subject,
        step=step + 8,
        since=step,
        factor=2.0,
        evidence="",
        is_over=is_over,
        error=0.02,
    )


SLOW, AS_BEFORE = slowness({"left": 2.0}, {}), Slowness()


class Followed:
    """A made-up run of a thousand steps, which take longer once it is slow."""

    def __init__(self, answers: Answers, moves: bool = True) -> None:
        self.moves, self.kept = list[Plan | None](), list[Plan]()
        self.replanning = Replanning(
            weighs=answers,
            move_to=self.moves.append if moves else None,
            keep=lambda plan: self.kept.append(plan) or "there",
            start_s=10.0,
        )
        self.replanning.begin(TWO_REPLICAS, PAIR)
        self.told, self.step = list[Outcome](), 0

    def goes_on(
        self, steps: int, step_s: float, *found: Slowdown, slow: Slowness = SLOW
    ) -> list[Outcome]:
        """Train `steps` steps, the first with these findings; return the outcomes."""
        told = list[Outcome]()
        for n in range(steps):
            self.step += 1
            told += self.replanning.after(
                self.step, step_s, 1000 - self.step, found if n == 0 else (), slow
            )
        self.told += told
        return told

    def moved(self, plan: Plan, pause_s: float = 6.0) -> None:
        """Report that the driver has moved to the plan."""
        self.replanning.on_recovery(
            Recovered(
                reason="",
                plan=plan,
                cluster=PAIR,
                started=frozenset(),
                from_step=self.step,
                step=self.step,
                num_bytes={},
                tier_s={},
                seconds={"compile": pause_s},
            )
        )

    @property
    def asked_for(self) -> list[Plan]:
        return [plan for plan in self.moves if plan is not None]


def test_by_default_a_run_says_once_what_would_gain_and_keeps_the_plan():
    run = Followed(answers := Answers(), moves=False)
    assert not run.goes_on(30, 1.0) and not run.goes_on(8, 2.0)
    [told] = run.goes_on(100, 2.0, slow_since(31))
    assert isinstance(told, PlanWeighed) and told.verdict == "say"
    assert told.move.step_s == 2.0  # the time since it is slow, not the time before
    assert run.kept == [OTHER] and "--plan there" in str(told)
    assert "1.50x (1.38 to 1.63) over the next 960 steps; moving" in str(told)
    assert answers.asked == [(TWO_REPLICAS, SLOW, {"left": 0.02})]


@pytest.mark.parametrize(("device", "factor"), [("cpu", 2.0), ("H20", 1.0)])
def test_a_slow_cpu_also_prepares_the_programs_of_a_move_more_slowly(
    device: str, factor: float
):
    run = Followed(Answers())
    nodes = tuple(replace(node, device=device) for node in PAIR.nodes)
    run.replanning.begin(TWO_REPLICAS, replace(PAIR, nodes=nodes))
    run.goes_on(38, 2.0)
    [told] = run.goes_on(3, 2.0, slow_since(31))
    assert isinstance(told, PlanWeighed)
    assert told.move.cost_s.median == pytest.approx(10.0 * factor)


def test_a_run_moves_once_and_says_what_that_has_gained():
    run = Followed(Answers())
    run.goes_on(30, 1.0)
    run.goes_on(8, 2.0)
    [told] = run.goes_on(3, 2.0, slow_since(31))
    assert isinstance(told, PlanWeighed) and told.verdict == "move"
    assert run.moves == [OTHER]
    run.moved(OTHER)
    assert not run.goes_on(2, 9.0)  # these two steps compile
    [told] = run.goes_on(200, 1.25)
    assert isinstance(told, MoveMeasured) and not told.is_worse
    assert told.gain.median == pytest.approx(2.0 / 1.25) and told.pause_s == 6.0
    assert run.asked_for == [OTHER]


def test_a_move_that_was_a_mistake_is_told_of_and_not_taken_back():
    run = Followed(Answers())
    run.goes_on(9, 2.0)
    run.goes_on(3, 2.0, slow_since(1))
    run.moved(OTHER)
    [told] = run.goes_on(300, 3.0)
    assert isinstance(told, MoveMeasured) and told.is_worse
    assert "slower steps after the move: 0.67x" in str(told)
    assert run.asked_for == [OTHER]


def test_what_comes_and_goes_is_followed_only_as_far_as_that_pays():
    """A second move counts on no more steps than there were since the first."""
    run = Followed(Answers())
    run.goes_on(9, 2.0)
    run.goes_on(3, 2.0, slow_since(1))
    run.moved(OTHER, pause_s=20.0)
    run.goes_on(20, 1.2)
    # 22 steps of 1.2 s: the move would cost 20 s to save 9 s
    [told] = run.goes_on(3, 1.2, slow_since(20, is_over=True), slow=AS_BEFORE)
    assert isinstance(told, PlanWeighed) and told.verdict == "stay" and not str(told)
    assert run.asked_for == [OTHER]
    run.goes_on(200, 1.2)
    [told] = run.goes_on(3, 1.2, slow_since(220), slow=SLOW)  # 20 s to save 90 s
    assert isinstance(told, PlanWeighed) and told.verdict == "move"


def test_slow_batches_are_no_reason_for_another_plan():
    run = Followed(answers := Answers())
    run.goes_on(10, 2.0, slow_since(1, what="batches"))
    assert not answers.asked


def test_what_is_over_before_the_run_has_moved_is_weighed_anew():
    run = Followed(answers := Answers())
    run.goes_on(9, 2.0)
    run.goes_on(3, 2.0, slow_since(1))
    assert run.moves == [OTHER]
    answers.gain = 1.0
    [told] = run.goes_on(3, 1.0, slow_since(10, is_over=True), slow=AS_BEFORE)
    assert run.moves == [OTHER, None]
    assert isinstance(told, PlanWeighed) and told.verdict == "stay"


def test_a_plan_that_others_have_changed_is_not_weighed_any_more():
    run = Followed(Answers(after=5))
    run.goes_on(9, 2.0)
    run.goes_on(2, 2.0, slow_since(1))
    run.moved(ONE_REPLICA)  # for example, because a node has left
    assert not run.goes_on(50, 2.0) and not run.asked_for


def test_work_goes_to_nodes_that_are_not_slow_and_doubt_about_that_is_told(
    tmp_path: Path,
):
    config = preset("tiny").config
    config = replace(config, run_dir=tmp_path, seq_len=SEQ_LEN, global_batch=8)
    both = replace(PAIR, nodes=tuple(replace(n, device="H20") for n in PAIR.nodes))
    found = [
        weigh(
            config,
            TINY,
            both,
            TWO_REPLICAS,
            slowness({"left": 8.0}, {}),
            {"left": error},
            3600.0,
        )
        for error in (0.01, 0.5)
    ]
    sure, unsure = found
    assert sure is not None and unsure is not None
    samples = {
        stage.node: r.num_microbatches * r.microbatch_size
        for r in sure.plan.replicas
        for stage in r.stages
    }
    assert samples.get("left", 0) < samples["right"]
    assert sure.gain.median == pytest.approx(sure.present_s / sure.other_s)
    assert 1 < sure.gain.low and unsure.gain.factor > sure.gain.factor


class MadeUpTimes:
    """Made-up times of workers: `left` takes twice as long within a range of steps.

    All else is the product's own, including the process that weighs plans and the move.
    """

    def __init__(self, slow: range) -> None:
        self.slow, self.step = slow, 0
        self.plan: Plan = HALVES
        self._draw = np.random.default_rng(0)

    def take(self) -> StepTimes:
        self.step += 1
        parts = {
            (r, s, kind): replica.num_microbatches
            * (stage.layers[1] - stage.layers[0])
            * (FACTOR if stage.node == "left" and self.step in self.slow else 1.0)
            * (1 + 0.02 * self._draw.standard_normal())
            for r, replica in enumerate(self.plan.replicas)
            for s, stage in enumerate(replica.stages)
            for kind in ("F", "B")
        }
        return StepTimes(step=self.step, parts=parts, links={})


STEPS, SLOW_AT, FACTOR = 72, range(21, 58), 2.0
# so slow a device is limited by its computation, not by its launches
DEVICES = """
name = "equals"
[[node]]
name = "left"
device = "abacus"
count = 1
peak_tflops = 1e-4
memory_gib = 8.0
memory_gb_per_s = 10.0
intra_node_gb_per_s = 10.0
network_gbit_per_s = 10.0
"""
EQUALS = DEVICES + DEVICES[DEVICES.index("[[node]]") :].replace("left", "right")
HALVES = plan(
    *(
        Replica(
            num_microbatches=3,
            microbatch_size=4,
            stages=(stage(node, (0,), (0, 4), 1),),
        )
        for node in ("left", "right")
    )
)
HALVES = replace(HALVES, global_batch=24)


def trained(
    run_dir: Path,
    asked: Literal["say", "auto"],
    slow: range,
    patched: pytest.MonkeyPatch,
) -> list[str]:
    """Train here while `left` is slow; return the outcomes of weighed plans."""
    times = MadeUpTimes(slow)
    begin: Callable[..., None] = SlowDevices.begin
    found: Callable[..., Weighed | None] = WeighingProcess.found

    def begin_with(self: SlowDevices, plan: Plan, cluster: Cluster) -> None:
        times.plan = plan
        begin(self, plan, cluster)

    def found_at_last(self: WeighingProcess) -> Weighed | None:
        """Wait for the answer, as many short steps would pass meanwhile."""
        while (answer := found(self)) is None and not self.has_ended:
            time.sleep(0.02)
        return answer or found(self)

    patched.setattr(SlowDevices, "begin", begin_with)
    patched.setattr(StepTiming, "pop_times", lambda self: times.take())
    patched.setattr(WeighingProcess, "found", found_at_last)
    patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    run_dir.parent.mkdir()
    (run_dir.parent / "equals.toml").write_text(EQUALS)
    made = small_preset(run_dir.parent, HALVES)
    config = replace(
        made.config,
        model="tests.training.small:small_model",
        planner="hetjax",
        global_batch=24,
        cluster=run_dir.parent / "equals.toml",
        plan=made.plan,
        replan=asked,
        watch_speeds="on",
        steps=1_000_000,
        stop_after=STEPS,
        evaluation=EvaluationConfig(every=0, num_batches=1, sample_tokens=0),
    )
    assert run(config, made, MODEL) == 4
    return [line["verdict"] for line in events(run_dir, "weighed")]


@pytest.mark.nightly
@pytest.mark.usefixtures("quickly")
def test_a_run_that_moves_by_itself_moves_once_and_changes_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stays, goes = tmp_path / "stays" / "run", tmp_path / "goes" / "run"
    with pytest.MonkeyPatch.context() as patched:
        assert trained(stays, "say", range(21, 999), patched) == ["say"]
    assert not events(stays, "recovered") and not events(stays, "moved")
    assert "--plan " + str(stays / "proposed.json") in capsys.readouterr().out
    proposed = read_plan(stays / "proposed.json")

    with pytest.MonkeyPatch.context() as patched:
        assert trained(goes, "auto", SLOW_AT, patched) == ["move", "stay"]
    [slow], [over] = events(goes, "slow"), events(goes, "as_before")
    assert SLOW_AT[0] <= slow["step"] <= SLOW_AT[0] + 10 < SLOW_AT[-1] < over["step"]
    [replanned], [recovered] = events(goes, "replanned"), events(goes, "recovered")
    assert recovered["lost_steps"] == 0 and {*recovered["bytes"]} <= {"memory"}
    [moved], weighed = events(goes, "moved"), events(goes, "weighed")[0]
    assert slow["step"] <= replanned["step"] < moved["step"]
    assert parse_plan(json.dumps(weighed["plan"])).replicas == HALVES.replicas
    now = read_plan(goes / "plan.json")
    assert parse_plan(json.dumps(weighed["to"])).replicas == now.replicas
    assert now.replicas == proposed.replicas != HALVES.replicas
    assert moved["pause_s"] == pytest.approx(
        sum(recovered["seconds"].values()), abs=0.1
    )

    expected, found = losses(stays), losses(goes)
    assert [*found] == [*expected] == [*range(1, STEPS + 1)]
    for step in found:
        assert found[step] == pytest.approx(expected[step], rel=1e-5), step
    assert "moved before step" in str(hetjax.report_of(goes))


@pytest.mark.usefixtures("environment")
def test_workers_that_a_plan_has_no_use_for_leave_and_come_back(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    on_left = replace(
        TWO_REPLICAS,
        replicas=(replace(TWO_REPLICAS.replicas[0], num_microbatches=4),),
    )
    moves, step, nodes = {1: on_left, 3: TWO_REPLICAS}, Driver.step, list[set[str]]()

    def step_and_ask(
        driver: Driver, number: int, *, traced: bool = False
    ) -> StepCommit:
        if number in moves:
            driver.move_to(moves[number])
        done = step(driver, number, traced=traced)
        nodes.append({*driver.plan.nodes})
        return done

    monkeypatch.setattr(Driver, "step", step_and_ask)
    run_dir = tmp_path / "run"
    assert main(training(run_dir, cache)) == 0
    assert worker_losses(run_dir) == pytest.approx(whole, rel=1e-5)
    both, left = {"left", "right"}, {"left"}
    assert nodes == [both, both, left, left, both, both]
    recovered = events(run_dir, "recovered")
    assert [line["step"] for line in recovered] == [2, 4]
    assert [line["lost_steps"] for line in recovered] == [0, 0]
    assert [line["started"] for line in recovered] == [[], ["right"]]  # started anew
    assert {line["reason"] for line in recovered} == {"moved to another plan"}
