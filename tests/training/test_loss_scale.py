# SPDX-License-Identifier: Apache-2.0
"""Runs with a float16 stage: the scale of their loss, and steps that overflow."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetjax.errors import RunFailed
from hetjax.plans.plan import Plan
from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main
from hetjax.training.recovery.loss_scaling import LossScale, LossScaling
from hetjax.training.recovery.not_finite import MOST_SKIPPED
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset
from tests.training import pair
from tests.training.small import MODEL, ONE_STAGE, but, events, lines, small_preset

pytestmark = pytest.mark.usefixtures("quick_compiling")

# some gradients of the logits are near 1: times 2**24, they exceed 65504
FIRST, GROWTH_INTERVAL = 2.0**24, 2


def in_float16(plan: Plan, replica: int, stage: int) -> Plan:
    """Return the plan with one stage of one replica in float16, others unchanged."""
    replicas = [*plan.replicas]
    stages = [*replicas[replica].stages]
    stages[stage] = replace(stages[stage], precision="float16")
    replicas[replica] = replace(replicas[replica], stages=tuple(stages))
    return replace(plan, replicas=tuple(replicas))


def scaled_preset(folder: Path, **changes: Any) -> Preset:
    preset = small_preset(folder, in_float16(ONE_STAGE, 0, 0))
    scale = {
        "loss_scale_init": FIRST,
        "loss_scale_growth_interval": GROWTH_INTERVAL,
        "steps": 16,
    }
    return but(preset, **scale | changes)


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of all steps, without times."""
    found = lines(run_dir / "metrics.jsonl")
    return [
        {name: value for name, value in line.items() if not name.endswith("_s")}
        for line in found
        if "loss_scale" in line
    ]


def assert_scales_follow_from_skips(steps: list[dict[str, Any]], first: float) -> None:
    """Assert the rule: half after a bad step, twice after GROWTH_INTERVAL good ones."""
    scale, good = first, 0
    for line in steps:
        assert line["loss_scale"] == scale, line
        assert line.get("skipped", False) == ("loss" not in line), line
        good = 0 if "skipped" in line else good + 1
        if "skipped" in line:
            scale /= 2
        elif good == GROWTH_INTERVAL:
            scale, good = 2 * scale, 0


@pytest.mark.parametrize("step", [3, 12])
def test_a_scale_halves_after_a_bad_step_and_doubles_after_so_many_good_ones(step: int):
    now = LossScale(64.0, since=3)
    assert now.after(step, False, 10) == LossScale(32.0, step + 1)
    then = {3: now, 12: LossScale(128.0, 13)}[step]  # 12 is the tenth good step
    assert now.after(step, True, 10) == then


def test_a_run_that_goes_back_has_the_scale_of_then():
    def commit(squares: float, scale: float | None) -> StepCommit:
        return StepCommit(squares=squares, losses=(), num_tokens=1, loss_scale=scale)

    scaling = LossScaling(64.0, 3, lambda cluster, plan: plan)
    scaling.on_step(0, commit(math.inf, 64.0))
    scaling.on_step(1, commit(1.0, 32.0))
    of_step_2 = {"attempt": "a", **json.loads(json.dumps(scaling.host_values()))}
    scaling.on_step(2, commit(1.0, 32.0))
    scaling.on_step(3, commit(1.0, 32.0))
    assert scaling.now == LossScale(64.0, 4)
    scaling.on_restored(Restored(step=4))  # the state that workers had in memory
    assert scaling.now == LossScale(64.0, 4)
    scaling.on_restored(Restored(step=2, host=of_step_2))
    assert scaling.now == LossScale(32.0, 1)
    scaling.on_restored(Restored(step=0))
    assert scaling.now == LossScale(64.0, 0)
    scaling.on_step(0, commit(math.inf, None))  # a plan without float16
    assert scaling.now == LossScale(64.0, 1)


def test_a_run_skips_what_overflows_and_goes_on_bit_equal_after_a_stop(tmp_path: Path):
    runs = [tmp_path / name for name in ("whole", "stopped")]
    for folder in runs:
        folder.mkdir()
    whole, stopped = (scaled_preset(folder) for folder in runs)
    assert run(whole.config, whole, MODEL) == 0
    steps = trained(whole.config.run_dir)
    assert [line["step"] for line in steps] == list(range(1, 17))
    assert_scales_follow_from_skips(steps, FIRST)
    bad = [line["step"] for line in steps if "skipped" in line]
    assert bad[0] == 1 and len(bad) < 14, "all begin too large, and some are good"
    # stop it while it counts good steps
    good = [
        a for a, b in zip(bad, bad[1:], strict=False) if b - a == GROWTH_INTERVAL + 1
    ]
    stop = (good or bad[-1:])[0] + 1
    stopping = but(stopped, stop_after=stop)
    assert run(stopping.config, stopping, MODEL) == 4
    assert run(stopped.config, stopped, MODEL) == 0
    assert trained(stopped.config.run_dir) == steps


def test_so_many_skipped_steps_in_a_row_end_the_run_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LossScale, "after", lambda self, *_: self)
    preset = scaled_preset(tmp_path, steps=MOST_SKIPPED + 5)
    with pytest.raises(RunFailed) as error:
        run(preset.config, preset, MODEL)
    assert f"{MOST_SKIPPED} steps in a row, up to step {MOST_SKIPPED}," in str(
        error.value
    )
    assert "--dtype float32" in str(error.value)
    assert len(trained(preset.config.run_dir)) == MOST_SKIPPED


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
def test_workers_skip_together_and_go_on_with_the_scale_and_its_count(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir, plan = tmp_path / "run", in_float16(pair.TWO_REPLICAS, 1, 0)
    options = ["--loss-scale-init", "65536", "--loss-scale-growth-interval", "2"]
    words = pair.training(run_dir, cache, *options, of=plan)
    assert main([*words, "--stop-after", "2"]) == 4
    assert main(words) == 0
    steps = trained(run_dir)
    assert [line["step"] for line in steps] == list(pair.STEPS)
    assert_scales_follow_from_skips(steps, 65536.0)
    assert "skipped" in steps[0]
    # the same if one of them is killed after a skipped step
    killed = tmp_path / "killed"
    pair.between_steps(monkeypatch, lambda: pair.kill(killed, "right"))
    assert main(pair.training(killed, cache, *options, of=plan)) == 0
    assert events(killed, "recovered")
    assert trained(killed) == steps
