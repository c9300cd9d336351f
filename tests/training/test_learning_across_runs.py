# SPDX-License-Identifier: Apache-2.0
"""`simulate`, `plan` and the next run use a run's measurements if it was real.

The oracle is the measured time that the test put in.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hetjax
from hetjax.cli.plan import plan as plan_command
from hetjax.cli.simulate import simulate
from hetjax.costs.certainty.kept import kept_file
from hetjax.errors import BadInput
from hetjax.plans.plan_files import write_plan
from hetjax.training.layout.plan_choice import read_run_calibration
from hetjax.training.observers.step_comparison import (
    StepComparison,
    learn_step,
    predict_step,
)
from hetjax.training.settings.config import RunConfig
from tests.training.small import MODEL, ONE_STAGE, SIX, small_preset

CLUSTER = hetjax.load_cluster(SIX)
KINDS = ["H20"]


def settings(directory: Path, name: str = "run", **changes: Any) -> RunConfig:
    chosen = small_preset(directory, ONE_STAGE)
    config = replace(chosen.config, run_dir=directory / name)
    config.run_dir.mkdir(exist_ok=True)
    return replace(config, simulate=False, **changes)


def learn(config: RunConfig, times: float = 3.0) -> float:
    """Let the run measure two steps that take `times` as long as the model says."""
    plain = replace(config, simulate=True, run_dir=config.run_dir / "nowhere")
    usual_s = predict_step(plain, MODEL, ONE_STAGE, CLUSTER).step_time_s
    for _ in range(2):
        learn_step(config, MODEL, ONE_STAGE, CLUSTER, times * usual_s)
    return times * usual_s


def simulated(**given: Any) -> Any:
    return hetjax.simulate_plan(
        ONE_STAGE, model=MODEL, cluster=CLUSTER, dtype="float32", quiet=True, **given
    )


def test_the_next_prediction_and_the_next_run_know_it(tmp_path: Path):
    before = simulated()
    assert before.values()["calibration"] is None
    assert "calibration" not in str(before)
    measured_s = learn(settings(tmp_path))
    step = simulated()
    assert measured_s in step.certainty.interval
    assert step.step_time_s == pytest.approx(measured_s, rel=0.15)
    assert step.certainty.interval.factor < before.certainty.interval.factor / 2
    told = step.values()["calibration"]
    assert told["source"] == str(kept_file()) and told["kinds"] == KINDS
    assert told["steps"] == 2
    (line,) = [x for x in str(step).splitlines() if x.startswith("calibration: ")]
    assert line.startswith(f"calibration: 2 steps on {', '.join(KINDS)}, ")
    assert "steps of earlier runs, before that" in str(step)
    following = predict_step(
        settings(tmp_path, "next"), MODEL, ONE_STAGE, CLUSTER
    ).step_time_s
    assert following == pytest.approx(step.step_time_s, rel=1e-6)
    usual = simulated(calibration="none")
    assert usual.step_time_s == before.step_time_s
    own = simulated(calibration=tmp_path / "run" / "calibration.json")
    assert own.values()["calibration"]["source"].endswith("run/calibration.json")
    assert own.certainty.interval.factor < step.certainty.interval.factor


def test_a_run_that_has_measured_a_step_no_longer_uses_those_of_other_runs(
    tmp_path: Path,
):
    for n in range(5):
        learn(settings(tmp_path, f"fast-{n}"), times=1.0)
    given = tmp_path / "fast-0" / "calibration.json"
    for name, file in (("slow", None), ("given", given)):
        slow = settings(tmp_path, name, calibration=file)
        measured_s = learn(slow, times=4.0)
        found_s = predict_step(slow, MODEL, ONE_STAGE, CLUSTER).step_time_s
        assert found_s == pytest.approx(measured_s, rel=0.02)
        own = json.loads((slow.run_dir / "calibration.json").read_text())
        assert len(own["steps"]) == 2
    assert len(json.loads(kept_file().read_text())["steps"]) == 14


def test_earlier_runs_that_contradict_each_other_leave_a_wide_interval(tmp_path: Path):
    alike, unlike = tmp_path / "alike", tmp_path / "unlike"
    found = {}
    for folder, factors in ((alike, (2.0, 2.0, 2.0)), (unlike, (1.0, 2.0, 4.0))):
        folder.mkdir()
        kept_file().unlink(missing_ok=True)
        measured_s = [learn(settings(folder, f"{n}"), f) for n, f in enumerate(factors)]
        found[folder] = simulated().certainty.interval
        assert all(s in found[folder] for s in measured_s)
    assert found[unlike].factor > 1.5 * found[alike].factor


def test_simulated_devices_neither_write_nor_read(tmp_path: Path):
    stand_ins = replace(settings(tmp_path), simulate=True)
    learn(stand_ins)
    assert (stand_ins.run_dir / "calibration.json").exists()
    assert not kept_file().exists()
    learn(settings(tmp_path, "real"))
    real, virtual = settings(tmp_path, "a"), settings(tmp_path, "b")
    virtual = replace(virtual, simulate=True)
    assert read_run_calibration(real, CLUSTER).observations
    assert not read_run_calibration(virtual, CLUSTER).observations


def test_a_run_can_be_told_to_begin_with_nothing_or_with_a_file(tmp_path: Path):
    first = settings(tmp_path)
    learn(first)
    file = first.run_dir / "calibration.json"
    without = settings(tmp_path, "without", calibration=Path("none"))
    assert not read_run_calibration(without, CLUSTER).observations
    given = settings(tmp_path, "given", calibration=file)
    assert read_run_calibration(given, CLUSTER).source == str(file)
    kept_file().write_text("damaged")  # it is not read then
    assert read_run_calibration(without, CLUSTER).source == ""
    missing = settings(tmp_path, "missing", calibration=tmp_path / "no.json")
    with pytest.raises(BadInput, match="no.json"):
        read_run_calibration(missing, CLUSTER)


def test_a_run_goes_on_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    config = settings(tmp_path)
    comparison = StepComparison(
        predict=lambda plan, cluster: predict_step(config, MODEL, plan, cluster),
        learn=partial(learn_step, config, MODEL),
        is_simulated=False,
    )
    comparison.begin(ONE_STAGE, CLUSTER)
    with pytest.warns(UserWarning, match="cannot keep .*: .*a file.*: Not a directory"):
        told = [comparison.add(1.0) for _ in range(4)]
    assert told[3] is not None and told[3].predicted is not None
    assert (config.run_dir / "calibration.json").exists()


def test_the_commands_use_it_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    learn(settings(tmp_path))
    file = tmp_path / "two.json"
    write_plan(file, ONE_STAGE)
    model = "tests.training.small:small_model"
    words = ["--model", model, "--cluster", str(SIX), "--dtype", "float32", "--json"]
    few = ["--global-batch", "6", "--seq-len", "16", "--compare", "none"]
    few += ["--microbatch-sizes", "2", "--tensor", "1", "--remat", "none"]
    few += ["--search-work", "1"]

    def told(command: Any, *more: str) -> Any:
        command([*more, *words])
        return json.loads(capsys.readouterr().out)

    with_, without = (
        told(simulate, str(file), *more) for more in ((), ("--calibration", "none"))
    )
    assert with_["calibration"]["steps"] == 2 and without["calibration"] is None
    assert with_["step_time_s"] > 2 * without["step_time_s"]
    assert any("earlier runs" in x for x in with_["interval"]["rests_on"].values())
    planned, plain = (
        told(plan_command, *few, *more) for more in ((), ("--calibration", "none"))
    )
    assert planned["calibration"]["steps"] == 2 and plain["calibration"] is None
    assert planned["step_time_s"] > plain["step_time_s"]
    with pytest.raises(BadInput, match="nowhere.json"):
        simulate([str(file), *words, "--calibration", "nowhere.json"])
