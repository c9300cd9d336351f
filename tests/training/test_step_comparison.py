# SPDX-License-Identifier: Apache-2.0
"""A run compares its step time with the predicted one, and learns from it."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import pytest

import hetjax
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.certainty.calibration import read_calibration
from hetjax.costs.certainty.kept import kept_file
from hetjax.costs.slowness.findings import Slowdown, Subject
from hetjax.costs.slowness.known import slowness, write_slowness
from hetjax.costs.slowness.step_times import StepTimes
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.report.display import Display
from hetjax.report.prediction import SimulatedStep
from hetjax.training.directory.journal import Journal
from hetjax.training.observers import slow_devices
from hetjax.training.observers.step_comparison import (
    ComparedStep,
    StepComparison,
    learn_step,
    predict_step,
)
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.recovered import Rerouted
from hetjax.training.session import run
from tests.training.small import MODEL, SIX, TWO_REPLICAS, but, lines, small_preset

CLUSTER = hetjax.load_cluster(SIX)


def test_a_run_says_once_what_was_measured_and_what_simulate_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    preset = but(small_preset(tmp_path), steps=5)
    assert run(preset.config, preset, MODEL) == 0
    run_dir = preset.config.run_dir
    events = lines(run_dir / "events.jsonl")
    [compared] = [event for event in events if event["event"] == "compared"]
    times_s = {
        x["step"]: x["step_time_s"]
        for x in lines(run_dir / "metrics.jsonl")[1:]
        if "loss" in x
    }
    assert compared["step"] == 4
    assert compared["measured_s"] == median(times_s[step] for step in (2, 3, 4))
    told = [x for x in capsys.readouterr().out.splitlines() if "ms predicted" in x]
    assert len(told) == 1 and "CPU here" in told[0] and "largest term: " in told[0]


def test_workers_are_predicted_as_simulate_predicts_them(tmp_path: Path):
    preset = small_preset(tmp_path)
    config = replace(preset.config, launcher="processes")
    cluster = hetjax.load_cluster(SIX)
    found = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    wanted = hetjax.simulate_plan(
        TWO_REPLICAS, model=MODEL, cluster=cluster, dtype=config.dtype, quiet=True
    )
    # except for the optimizer's counters, which simulate does not know without a run
    assert found.step_time_s == pytest.approx(wanted.step_time_s, rel=1e-6)
    sure, as_simulated = found.certainty, wanted.certainty
    assert sure is not None and as_simulated is not None
    assert sure.basis == as_simulated.basis
    for end in ("low", "high"):
        of_run, other = (getattr(x.interval, end) for x in (sure, as_simulated))
        assert of_run == pytest.approx(other, rel=1e-6)


def refuse(plan: Plan, cluster: Cluster) -> NoReturn:
    raise BadInput(
        got="device 'X9' is unknown", allowed="known ones", fix="describe it"
    )


def unlearnt(*step: object, again: bool) -> None:
    raise AssertionError("nothing was predicted")


def test_each_plan_is_compared_after_its_fourth_step_and_the_first_does_not_count():
    cluster = hetjax.load_cluster(SIX)
    comparison = StepComparison(predict=refuse, learn=unlearnt, is_simulated=False)
    assert comparison.add(1.0) is None  # no plan yet
    for first_s in (9.0, 7.0):
        comparison.begin(TWO_REPLICAS, cluster)
        found = [comparison.add(s) for s in (first_s, 2.0, 4.0, 3.0, 6.0)]
        assert [one is not None for one in found] == [False, False, False, True, False]
        assert found[3] is not None and found[3].measured_s == 3.0
        assert "measured; no prediction: device 'X9' is unknown" in str(found[3])
        assert json.loads(json.dumps(found[3].values()))["predicted_s"] is None


def learning(found: Any) -> tuple[StepComparison, list[Any]]:
    """Return a comparison with a prediction, and what it will have learnt."""
    learnt: list[Any] = []
    comparison = StepComparison(
        predict=lambda *_: found,
        learn=lambda *step, again: learnt.append((*step, again)),
        is_simulated=False,
    )
    return comparison, learnt


def predicted_step(directory: Path) -> SimulatedStep:
    return predict_step(small_preset(directory).config, MODEL, TWO_REPLICAS, CLUSTER)


@contextmanager
def recorder_of(directory: Path, comparison: StepComparison) -> Iterator[Recorder]:
    """Yield a recorder that has begun to compare a plan."""
    journal = Journal(directory / "events.jsonl", last_step=0)
    with closing(journal):
        comparison.begin(TWO_REPLICAS, CLUSTER)
        yield Recorder(directory, journal, journal, Display(20), comparison)


def timed(step: int, seconds: float) -> StepTimes:
    return StepTimes(step=step, parts={(0, 0, "F"): seconds}, links={})


def test_what_is_learnt_of_parts_is_of_the_warm_steps_of_this_plan(tmp_path: Path):
    comparison, learnt = learning(predicted_step(tmp_path))
    with recorder_of(tmp_path, comparison) as recorder:
        for first in (1, 11):
            comparison.begin(TWO_REPLICAS, CLUSTER)
            recorder.compare(first, 9.0, timed(first, 99.0))  # compiles
            recorder.compare(first + 1, 2.0, timed(first, 77.0))  # of another step
            recorder.compare(first + 2, 2.0, timed(first + 2, 1.0))
            recorder.compare(first + 3, 2.0)  # the run ends: its times never come
    assert [parts for *_, parts, _ in learnt] == 2 * [{(0, 0, "F"): 1.0}]


def test_a_plan_is_learnt_again_from_more_steps_where_these_are_unlike(tmp_path: Path):
    comparison, learnt = learning(predicted_step(tmp_path))
    for _ in range(2):  # of the second plan, too
        comparison.begin(TWO_REPLICAS, CLUSTER)
        for num, seconds in ((4, 2.0), (8, 1.0), (16, 1.02), (32, 1.1), (500, 9.0)):
            for step in range(num):
                # one step that took long, as on a shared machine, changes no median
                comparison.add(7.0 if step == 1 else seconds, timed(1, seconds))
    rows = [(s, again) for _, _, s, _, again in learnt]
    assert rows == 2 * [(2.0, False), (1.0, True), (1.1, True)]
    parts = [parts[0, 0, "F"] for *_, parts, _ in learnt]
    assert parts == 2 * [2.0, 1.0, 1.1]


@pytest.mark.parametrize(
    ("num_first", "num_later", "seconds", "learns"),
    [
        (3, 0, 1.0, False),  # parts are not lost
        (3, 1, 1.0, False),  # one odd step does not stand for three
        (3, 3, 1.0, True),
        (0, 0, 1.0, True),  # --watch-speeds off
        (0, 2, 2.0, True),  # parts are new
        (3, 8, 2.0, False),
    ],
)
def test_steps_replace_others_only_if_as_many_were_timed(
    num_first: int, num_later: int, seconds: float, learns: bool, tmp_path: Path
):
    comparison, learnt = learning(predicted_step(tmp_path))
    comparison.begin(TWO_REPLICAS, CLUSTER)
    for step in range(4):
        comparison.add(2.0, timed(step, 1.0) if 0 < step <= num_first else None)
    for step in range(8):
        comparison.add(seconds, timed(step, 1.0) if step < num_later else None)
    assert len(learnt) == 1 + learns


def test_after_something_was_slow_the_next_steps_are_learnt_whatever_they_take(
    tmp_path: Path,
):
    comparison, learnt = learning(predicted_step(tmp_path))
    finding = Slowdown(
        subject=Subject(what="node", name="h20-0"),
        step=9,
        since=2,
        factor=2.0,
        evidence="others as before",
    )
    with recorder_of(tmp_path, comparison) as recorder:
        for step in range(9):
            recorder.compare(step, 2.0)
        recorder.slow(finding)
        for step in range(7):
            recorder.compare(9 + step, 2.0)
        assert len(learnt) == 1  # steps before the finding count no more
        recorder.compare(16, 2.0)
    assert [again for *_, again in learnt] == [False, True]


def test_steps_without_a_replica_teach_nothing(tmp_path: Path):
    comparison, learnt = learning(predicted_step(tmp_path))
    lost = Rerouted(
        reason="worker h20-0: lost", replicas=(1,), from_step=4, step=4, seconds={}
    )
    with recorder_of(tmp_path, comparison) as recorder:
        for step in range(4):
            recorder.compare(step, 2.0)
        recorder.rerouting(lost)
        for step in range(60):
            recorder.compare(4 + step, 9.0)
    assert [s for _, _, s, *_ in learnt] == [2.0]


def unlike_steps(tmp_path: Path, *raised: Exception | None) -> list[bool]:
    """Let a plan's later steps take half as long as its first four.

    The function that learns raises these errors in turn. Returns the `again` of each of
    its calls.
    """
    again_of: list[bool] = []

    def learn(*step: object, again: bool) -> None:
        again_of.append(again)
        error = raised[len(again_of) - 1] if len(again_of) <= len(raised) else None
        if error is not None:
            raise error

    found = predicted_step(tmp_path)
    comparison = StepComparison(
        predict=lambda *_: found, learn=learn, is_simulated=False
    )
    comparison.begin(TWO_REPLICAS, CLUSTER)
    for step in range(100):
        comparison.add(2.0 if step < 4 else 1.0)
    return again_of


def test_a_profile_that_changes_in_a_run_ends_learning_and_not_the_run(tmp_path: Path):
    bad = BadInput(got="profile.json of another model", allowed="", fix="")
    with pytest.warns(UserWarning, match="learns no more .*: profile.json of another"):
        assert unlike_steps(tmp_path, None, bad) == [False, True]


def test_a_step_that_a_full_disk_did_not_keep_is_replaced_by_none(tmp_path: Path):
    full = OSError(ENOSPC, "No space left on device", "calibration.json")
    with pytest.warns(UserWarning, match="cannot keep .*: No space left"):
        assert unlike_steps(tmp_path, full) == [False, False]


def test_a_run_on_a_real_device_learns_how_long_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slow_devices, "_ACTION_S", 0.0)  # its steps are very short
    one = Node(name="here", device="cpu", count=1)
    file = tmp_path / "here.toml"
    file.write_text(cluster_toml(Cluster(name="here", nodes=(one,))))
    preset = but(small_preset(tmp_path), steps=5, simulate=False, cluster=file)
    preset = replace(preset, plan=None)
    assert run(preset.config, preset, MODEL) == 0
    seen = read_calibration(preset.config.run_dir / "calibration.json")
    (step,) = (o for o in seen.observations if o.what == "step")
    work = [o for o in seen.observations if o.what == "work"]
    assert len(work) in (2, 4)  # the update and the passes: fused, or F and B apart
    assert 0 < sum(o.measured_s for o in work) < 2 * step.measured_s
    assert all(("cpu", "launches") in o.elasticities for o in work)


@pytest.mark.parametrize(("measured_s", "advised"), [(1.0, False), (2.0, True)])
def test_estimates_that_are_far_off_come_with_advice(
    measured_s: float, advised: bool, tmp_path: Path
):
    preset = small_preset(tmp_path)
    cluster = hetjax.load_cluster(SIX)
    found: Any = predict_step(preset.config, MODEL, TWO_REPLICAS, cluster)
    comparison, learnt = learning(found)
    comparison.begin(TWO_REPLICAS, cluster)
    step_s = measured_s * found.step_time_s
    told: list[ComparedStep | None] = [comparison.add(step_s) for _ in range(4)]
    percent = f"{measured_s - 1:+.1%}"
    assert percent in str(told[3])
    assert [step[2] for step in learnt] == [pytest.approx(step_s)]
    assert ("hetjax profile" in str(told[3])) is advised


def test_what_a_run_measured_is_predicted_from_then_on(tmp_path: Path):
    preset = small_preset(tmp_path)
    config = replace(preset.config, run_dir=tmp_path)
    cluster = hetjax.load_cluster(SIX)
    before = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    measured_s = 3 * before.step_time_s
    learn_step(config, MODEL, TWO_REPLICAS, cluster, measured_s)
    after = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    assert after.step_time_s == pytest.approx(measured_s, rel=0.15)
    assert after.predicted.times_from.startswith(
        "at speeds learnt from 1 measured step"
    )
    learn_step(config, MODEL, TWO_REPLICAS, cluster, measured_s)
    again = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    assert again.step_time_s == pytest.approx(measured_s, rel=0.03)
    file = tmp_path / "calibration.json"
    step = hetjax.simulate_plan(
        TWO_REPLICAS,
        model=MODEL,
        cluster=cluster,
        dtype=config.dtype,
        calibration=file,
        quiet=True,
    )
    assert step.step_time_s == pytest.approx(measured_s, rel=0.1)
    assert step.certainty is not None and "steps of a run" in str(step)
    assert measured_s in step.certainty.interval
    assert len(json.loads(file.read_text())["steps"]) == 2


def test_a_plan_that_is_learnt_again_takes_the_place_of_its_first_steps(tmp_path: Path):
    config = replace(small_preset(tmp_path).config, run_dir=tmp_path, simulate=False)
    cluster = hetjax.load_cluster(SIX)

    def learn(plan: Plan, times: float, *, again: bool) -> float:
        measured_s = times * usual_s[plan]
        learn_step(config, MODEL, plan, cluster, measured_s, again=again)
        return measured_s

    plans = TWO_REPLICAS, replace(TWO_REPLICAS, schedule="gpipe")
    usual_s = {
        plan: predict_step(config, MODEL, plan, cluster).step_time_s for plan in plans
    }
    learn(plans[1], 3.0, again=True)  # there is nothing in whose place
    learn(plans[0], 5.0, again=True)  # another plan's step stays
    measured_s = learn(plans[0], 3.0, again=True)
    for name in (tmp_path / "calibration.json", kept_file()):
        rows = json.loads(name.read_text())["steps"]
        found = [row.get("step", row)["measured_s"] for row in rows]
        assert found == [3.0 * usual_s[plans[1]], measured_s]
    step_s = predict_step(config, MODEL, plans[0], cluster).step_time_s
    assert step_s == pytest.approx(measured_s, rel=0.05)


def test_what_a_slow_node_takes_is_not_learnt_as_the_speed_of_its_kind(tmp_path: Path):
    config = replace(small_preset(tmp_path).config, run_dir=tmp_path)
    cluster = hetjax.load_cluster(SIX)
    usual = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    file = tmp_path / "slow.json"
    write_slowness(file, slowness({"h20-0": 4.0}, {}))
    slow = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    measured_s = slow.step_time_s
    assert measured_s > 2 * usual.step_time_s
    learn_step(config, MODEL, TWO_REPLICAS, cluster, measured_s)
    file.unlink()  # no longer slow
    found = predict_step(config, MODEL, TWO_REPLICAS, cluster)
    assert found.step_time_s == pytest.approx(usual.step_time_s, rel=1e-3)
