# SPDX-License-Identifier: Apache-2.0
"""A run with its masters on the host has the losses of one with them on devices.

Checkpoints move between the two. An `--offload` that no planner would use is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from hetjax.cluster.cluster_files import load_cluster
from hetjax.errors import BadInput
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.replan import replan
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan, write_plan
from hetjax.training.layout.plan_choice import next_plan
from hetjax.training.session import run
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.presets import Preset
from tests.training.small import MODEL, SIX, TWO_REPLICAS, but, losses, small_preset

pytestmark = pytest.mark.usefixtures("quick_compiling")


def offloaded(plan: Plan) -> Plan:
    replicas = tuple(
        replace(r, stages=tuple(replace(s, offload="optimizer") for s in r.stages))
        for r in plan.replicas
    )
    return replace(plan, replicas=replicas)


def trained(preset: Preset, **changes: object) -> int:
    changed = but(preset, **changes)
    return run(changed.config, changed, MODEL)


def test_losses_are_the_same_and_checkpoints_move_between_the_two(tmp_path: Path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = small_preset(tmp_path / "here")
    assert trained(here) == 0
    there = small_preset(tmp_path / "there", offloaded(TWO_REPLICAS))
    assert trained(there, stop_after=4) == 4
    back = tmp_path / "back.json"
    write_plan(back, TWO_REPLICAS)
    assert trained(there, stop_after=3, plan=back) == 4
    again = tmp_path / "again.json"
    write_plan(again, offloaded(TWO_REPLICAS))
    assert trained(there, plan=again) == 0
    expected, found = losses(here.config.run_dir), losses(there.config.run_dir)
    assert list(found) == list(range(1, 11))
    for step, value in found.items():
        assert value == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.nightly
def test_the_even_planner_does_so_where_asked(tmp_path: Path):
    preset = small_preset(tmp_path)
    asked = but(preset, offload="optimizer", stop_after=1)
    assert run(asked.config, preset, MODEL) == 4
    plan = read_plan(preset.config.run_dir / "plan.json")
    assert {stage.offload for _, _, stage in plan.stages()} == {"optimizer"}


@pytest.mark.parametrize("planner", ["even", "hetjax"])
def test_another_plan_for_fewer_nodes_may_do_so_too(
    planner: Literal["even", "hetjax"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    config = replace(small_preset(tmp_path).config, planner=planner)
    cluster = load_cluster(SIX)
    fewer = replace(cluster, nodes=cluster.nodes[1:])
    asked: list[PlanRequest] = []

    def looked(request: PlanRequest, *given: Any, **others: Any) -> Any:
        asked.append(request)
        return replan(request, *given, **others)

    monkeypatch.setattr("hetjax.planner.search.replan.replan", looked)
    found = next_plan(config, MODEL, fewer, offloaded(TWO_REPLICAS))
    if planner == "even":
        assert {stage.offload for _, _, stage in found.stages()} == {"optimizer"}
    else:
        assert [request.offloads for request in asked] == [("none", "optimizer")]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"offload": "auto"}, "--offload auto with --planner even"),
        ({"offload": "optimizer", "plan": Path("p.json")}, "with --plan p.json"),
    ],
)
def test_a_choice_that_nobody_would_make_is_refused(
    tmp_path: Path, changes: dict[str, object], told: str
):
    with pytest.raises(BadInput, match=told):
        check_config(but(small_preset(tmp_path), **changes).config)
