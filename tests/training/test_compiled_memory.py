# SPDX-License-Identifier: Apache-2.0
"""The compiler's figures for a run's programs replace the memory model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from hetjax.api.simulating import simulate_plan
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.measured.compiled import CompiledBytes, parse_compiled, read_compiled
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.plans.plan import Plan, Replica
from hetjax.plans.plan_files import write_plan
from hetjax.runtime.execution import stages
from hetjax.training.layout.compiled_memory import read_run_compiled
from hetjax.training.layout.plan_choice import choose_plan, next_plan
from hetjax.training.observers.step_comparison import predict_step
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset
from tests.training.small import (
    MODEL,
    ONE_STAGE,
    but,
    events,
    plan,
    small_preset,
    stage,
)

pytestmark = pytest.mark.usefixtures("quick_compiling")

GIB = 2**30
TWO = Cluster(
    name="two",
    nodes=tuple(
        Node(name=name, device="cpu", count=1, memory_gib=1.0) for name in ("a", "b")
    ),
)


def two_stages(microbatch_size: int = 2) -> Plan:
    cuts = (stage("a", (0,), (0, 2), 2), stage("b", (0,), (2, 4), 1))
    size = microbatch_size
    return plan(Replica(num_microbatches=6 // size, microbatch_size=size, stages=cuts))


@pytest.fixture
def preset(tmp_path: Path) -> Preset:
    """A run on the CPUs of this machine, with a plan file."""
    jax.local_devices()
    file = tmp_path / "two.toml"
    file.write_text(cluster_toml(TWO))
    found = replace(small_preset(tmp_path, two_stages()), cluster=file, plan=None)
    return but(
        found, simulate=False, cluster=file, steps=2, plan=tmp_path / "plan.json"
    )


def workspaces(of: Plan, compiled: CompiledBytes) -> list[int]:
    costs = costs_of(of, MODEL, TWO, dtype="float32", halves=False, compiled=compiled)
    return [costs.memory[0, s].workspace_bytes for s in (0, 1)]


def said_by_xla(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets XLA's temporary bytes of each later compilation."""
    told, compile_ = list[int](), jax.stages.Lowered.compile

    def compiling(self: Any, *given: Any, **options: Any) -> Any:
        program = compile_(self, *given, **options)
        analysis = program.memory_analysis()
        assert analysis is not None
        told.append(analysis.temp_size_in_bytes)
        return program

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    return told


def grow(monkeypatch: pytest.MonkeyPatch, grown: Callable[[], bool]) -> None:
    """Let the compiler report two GiB more while `grown` returns True."""
    real = stages.temp_bytes
    monkeypatch.setattr(
        stages, "temp_bytes", lambda of: (real(of) or 0) + 2 * GIB * grown()
    )


def test_a_run_keeps_what_the_compiler_says_and_costs_use_it(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
):
    modelled, told = workspaces(two_stages(), {}), said_by_xla(monkeypatch)
    assert run(preset.config, preset, MODEL) == 0
    compiled = read_run_compiled(preset.config)
    programs = sorted(tuple(sorted(found)) for found in compiled.values())
    assert programs == [("B", "F"), ("FB",), ("UPDATE",), ("UPDATE",)]
    found = workspaces(two_stages(), compiled)
    assert found != modelled
    assert {*found} <= {*told}
    assert {size for each in compiled.values() for size in each.values()} <= {*told}
    # the plan's next prediction and every later plan for this run use it
    predicted = predict_step(preset.config, MODEL, two_stages(), TWO).predicted
    assert predicted.times_from.endswith("; workspace measured by the compiler")


def test_commands_use_the_file_that_they_are_given(preset: Preset):
    assert run(preset.config, preset, MODEL) == 0
    path = preset.config.run_dir / "compiled.json"
    given = {"model": MODEL, "cluster": TWO, "quiet": True, "dtype": "float32"}
    known = simulate_plan(two_stages(), compiled=path, **given)
    estimated = simulate_plan(two_stages(), **given)
    told = "; workspace measured by the compiler"
    assert known.predicted.times_from == estimated.predicted.times_from + told
    costs = known.predicted.costs
    assert [costs.memory[0, s].workspace_bytes for s in (0, 1)] == workspaces(
        two_stages(), read_compiled(path)
    )


def test_programs_of_another_size_are_others(preset: Preset):
    assert run(preset.config, preset, MODEL) == 0
    compiled = read_run_compiled(preset.config)
    for other in (
        two_stages(microbatch_size=1),
        replace(two_stages(), seq_len=8),
        with_stage(two_stages(), remat="full"),
        with_stage(two_stages(), attention="xla"),
        with_stage(two_stages(), precision="bfloat16"),
    ):
        assert workspaces(other, compiled)[0] == workspaces(other, {})[0]


def with_stage(of: Plan, **changes: Any) -> Plan:
    """Return the plan with a changed first stage."""
    (replica,) = of.replicas
    first, last = replica.stages
    first = replace(first, **changes)
    return replace(of, replicas=(replace(replica, stages=(first, last)),))


def test_figures_survive_a_resume_and_bind_the_next_plan(
    preset: Preset, tmp_path: Path
):
    assert run(preset.config, preset, MODEL) == 0
    path = preset.config.run_dir / "compiled.json"
    before = read_compiled(path)
    assert run(replace(preset.config, steps=3), preset, MODEL) == 0
    assert read_compiled(path) == before
    values = json.loads(path.read_text())
    for passes in values["programs"].values():
        passes.update(dict.fromkeys(passes, 2 * GIB))
    path.write_text(json.dumps(values))
    with pytest.raises(NoFeasiblePlan, match=r"device '.*/0' needs"):
        choose_plan(preset.config, MODEL, TWO, preset, None)
    again = but(preset, plan=None, planner="hetjax").config
    found = next_plan(again, MODEL, TWO, two_stages())
    assert max(workspaces_of_all(found, read_compiled(path))) < GIB


def workspaces_of_all(of: Plan, compiled: CompiledBytes) -> list[int]:
    costs = costs_of(of, MODEL, TWO, dtype="float32", halves=False, compiled=compiled)
    return [memory.workspace_bytes for memory in costs.memory.values()]


def test_a_given_plan_that_does_not_fit_once_compiled_is_refused(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
):
    grow(monkeypatch, lambda: True)
    with pytest.raises(NoFeasiblePlan, match="after compilation") as refused:
        run(preset.config, preset, MODEL)
    assert "workspace" in refused.value.got
    assert "GiB" in refused.value.allowed
    assert not (preset.config.run_dir / "metrics.jsonl").exists()


def test_the_planner_plans_once_more_where_its_plan_does_not_fit(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
):
    config = but(preset, plan=None, planner="hetjax").config
    first = choose_plan(config, MODEL, TWO, preset, None).plan
    counted = list[int]()

    def grown() -> bool:
        counted.append(1)
        return not (config.run_dir / "compiled.json").exists()

    grow(monkeypatch, grown)
    assert run(config, preset, MODEL) == 0
    (started,) = events(config.run_dir, "started")
    assert started["plan"].startswith("planner 'hetjax'")
    second = json.loads((config.run_dir / "plan.json").read_text())
    assert counted
    write_plan(config.run_dir / "first.json", first)
    assert second != json.loads((config.run_dir / "first.json").read_text())


@pytest.mark.nightly
def test_the_planner_does_not_plan_for_ever(
    preset: Preset, monkeypatch: pytest.MonkeyPatch
):
    grow(monkeypatch, lambda: True)
    config = but(preset, plan=None, planner="hetjax").config
    with pytest.raises(NoFeasiblePlan, match="after compilation"):
        run(config, preset, MODEL)


def test_nothing_is_kept_of_cpus_that_stand_in_for_other_devices(tmp_path: Path):
    simulated = small_preset(tmp_path, ONE_STAGE)
    config = replace(simulated.config, steps=1)
    assert run(config, simulated, MODEL) == 0
    assert not (config.run_dir / "compiled.json").exists()


def test_a_broken_file_is_refused():
    with pytest.raises(BadInput, match="broken JSON"):
        parse_compiled("{")
    with pytest.raises(BadInput, match="no programs|programs"):
        parse_compiled('{"version": 1}')
    with pytest.raises(BadInput, match="version 2"):
        parse_compiled('{"version": 2, "programs": {}}')
