# SPDX-License-Identifier: Apache-2.0
"""A profile states how much surer it makes predictions, as `simulate` states it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import hetjax
from hetjax.api.profiling import narrowing_lines
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import Profile, read_profile
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.report.measured import MeasuredProfile
from tests.profiling.test_imported import A100, V100, imported, sailors

MODEL = model_preset("tiny")
LINE = "how sure: 90% of steps on one {} within a factor of (.*) of their prediction "
LINE += "with this profile, (.*) without"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name, device in (("a", A100), ("v", V100)):
        imported(tmp_path, "--sailor", sailors(tmp_path, name), "--device", device)
    return tmp_path / "p.json"


def factor(device: str, profile: Path | None) -> float:
    """Return the upper interval end over the step, for a microbatch on one device."""
    layers = (0, len(MODEL.layers))
    stage = Stage(node="here", devices=(0,), layers=layers, launch_ahead=1)
    replica = Replica(stages=(stage,), num_microbatches=1, microbatch_size=4)
    step = hetjax.simulate_plan(
        Plan(
            model="tiny",
            seq_len=64,
            global_batch=4,
            replicas=(replica,),
            schedule="1f1b",
        ),
        cluster=Cluster(name="x", nodes=(Node(name="here", device=device, count=1),)),
        profile=profile,
        dtype="float32",
        calibration="none",
        quiet=True,
    )
    return step.values()["interval"]["step_time_s"][1] / step.step_time_s


def test_each_kind_has_a_line_with_what_simulate_says(file: Path):
    profile = read_profile(file)
    lines = [*narrowing_lines(profile, file, MODEL)]
    for line, device in zip(lines, (A100, V100), strict=True):
        found = re.fullmatch(LINE.format(device), line)
        assert found is not None, line
        by_profile, without = map(float, found.groups())
        assert by_profile == pytest.approx(factor(device, file), abs=0.006)
        assert without == pytest.approx(factor(device, None), abs=0.006)
        assert by_profile < without
    result = MeasuredProfile(profile=profile, path=file, how_sure=tuple(lines))
    assert str(result).splitlines()[-2:] == lines
    assert all(line in result._repr_html_() for line in lines)


def test_a_kind_that_nobody_describes_has_none(file: Path):
    profile = read_profile(file)
    first = replace(profile.measurements[0], device="mine")
    mine: Profile = replace(profile, measurements=(first, *profile.measurements[3:]))
    assert "mine" in mine.devices
    lines = [*narrowing_lines(mine, file, MODEL)]
    assert len(lines) == 1 and V100 in lines[0]


def test_the_command_prints_them_for_what_was_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    imported(tmp_path, "--sailor", sailors(tmp_path, "a"), "--device", A100)
    assert re.search(LINE.format(A100), capsys.readouterr().out)
