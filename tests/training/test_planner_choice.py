# SPDX-License-Identifier: Apache-2.0
"""`train` plans by itself, always the same plan, and only what fits into memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml, load_cluster
from hetjax.costs.measured.layer_profile import Measurement, Profile, write_profile
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.presets import MODEL_CONFIGS, model_preset
from hetjax.plan import main as plan_command
from hetjax.planner.model.costing import known_memory_bytes
from hetjax.plans.plan_files import read_plan, write_plan
from hetjax.train import main
from hetjax.training.layout.plan_choice import Choice, choose_plan
from hetjax.training.session import run
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.presets import PRESETS, Preset
from hetjax.training.start import describe
from tests.training.small import (
    MODEL,
    MODEL_CONFIG,
    ONE_REPLICA,
    SIX,
    TWO_REPLICAS,
    but,
    lines,
    small_preset,
)

TINY = load_cluster(SIX)
TWO = Cluster(
    name="two",
    nodes=(
        Node(name="h20-0", device="H20", count=1),
        Node(name="v100-0", device="V100-SXM2-32GB", count=1),
    ),
    links=(Link(between=("h20-0", "v100-0"), bandwidth_gbit_per_s=10.0),),
)


def test_a_start_names_the_devices_that_its_plan_does_not_use(tmp_path: Path):
    hardware = SimpleNamespace(cluster=TINY, source="given", devices={})
    start = SimpleNamespace(
        config=small_preset(tmp_path).config,
        model=MODEL,
        hardware=hardware,
        choice=Choice(plan=ONE_REPLICA, source="given"),
    )
    dataset = SimpleNamespace(num_tokens=9, bytes_per_token=1.0, directory="text")
    notes: list[str] = []
    shown = SimpleNamespace(note=notes.append)
    describe(cast(Any, start), cast(Any, dataset), cast(Any, shown))
    assert notes[-1] == "not used by this plan: 2 of 3 devices of h20-0"
    more = replace(TINY, nodes=(*TINY.nodes, replace(TINY.nodes[0], name="spare")))
    hardware.cluster = more
    describe(cast(Any, start), cast(Any, dataset), cast(Any, shown))
    assert notes[-1] == "not used by this plan: 2 of 3 devices of h20-0, spare"


def measurements(device: str) -> list[Measurement]:
    """Return measurements of one second for each kind of layer."""
    return [
        Measurement(
            device=device,
            kind=kind,
            tensor=1,
            microbatch_size=1,
            forward_s=0.25,
            backward_s=0.75,
            update_s=0.0,
        )
        for kind in ("embedding", "block", "head")
    ]


PROFILE = Profile(
    model="small",
    seq_len=16,
    dtype="float32",
    layers=("embedding", "block", "block", "head"),
    measurements=(*measurements("H20"), *measurements("V100-SXM2-32GB")),
)


@pytest.fixture
def planning(tmp_path: Path) -> Preset:
    """A preset without a plan that uses hetjax's own planner."""
    jax.local_devices()  # all 16, before a run simulates only what it needs
    return but(replace(small_preset(tmp_path), plan=None), planner="hetjax")


def chosen(preset: Preset, cluster: Cluster = TINY) -> Choice:
    return choose_plan(preset.config, MODEL, cluster, preset, None)


def test_the_planner_is_asked_and_plans_alike_each_time(planning: Preset):
    told: list[str] = []
    choice = choose_plan(planning.config, MODEL, TWO, planning, None, told.append)
    assert choice.source.startswith("planner 'hetjax', step time ")
    predicted = choice.plan.predicted
    assert predicted is not None and predicted.step_time_s is not None
    assert predicted.lower_bound_s is not None
    assert 0 < predicted.lower_bound_s <= predicted.step_time_s
    assert told == ["planning for 2 devices"]
    assert chosen(planning, TWO).plan == choice.plan


def test_a_run_plans_as_well_as_the_command(planning: Preset, tmp_path: Path):
    nodes = [Node(name=name, device="V100-SXM2-32GB", count=1) for name in "ab"]
    cluster, model = Cluster(name="two", nodes=tuple(nodes)), model_preset("gpt2-124m")
    file, output = tmp_path / "two.toml", tmp_path / "plan.json"
    file.write_text(cluster_toml(cluster))
    words = ["--cluster", str(file), "--model", "gpt2-124m", "--output", str(output)]
    sizes = ["--seq-len", "256", "--global-batch", "6", "--compare", "none"]
    assert plan_command([*words, *sizes]) == 0
    ours = but(planning, seq_len=256, global_batch=6, dtype=None)
    plan = choose_plan(ours.config, model, cluster, ours, None).plan
    searched, theirs = plan.predicted, read_plan(output).predicted
    assert searched is not None and theirs is not None
    assert searched.step_time_s == pytest.approx(theirs.step_time_s, rel=1e-6)


def test_the_even_planner_splits_evenly(planning: Preset):
    plan = chosen(but(planning, planner="even")).plan
    assert len({len(replica.stages) for replica in plan.replicas}) == 1
    assert plan.predicted is None


def test_measured_times_count_where_there_are_any(planning: Preset, tmp_path: Path):
    estimated = chosen(planning, TWO).plan.predicted
    assert estimated is not None and estimated.step_time_s is not None
    assert estimated.step_time_s < 1
    planning.config.run_dir.mkdir()
    write_profile(planning.config.run_dir / "profile.json", PROFILE)
    write_profile(tmp_path / "mine.json", PROFILE)
    for preset in (planning, but(planning, profile=tmp_path / "mine.json")):
        plan = chosen(preset, TWO).plan
        assert plan.predicted is not None and plan.predicted.step_time_s is not None
        # 6 microbatches of 4 layers of a second, on two devices of equal speed
        assert 12 <= plan.predicted.step_time_s <= 15


def test_a_profile_of_something_else_is_refused(planning: Preset, tmp_path: Path):
    path = tmp_path / "mine.json"
    preset = but(planning, profile=path)
    write_profile(path, replace(PROFILE, seq_len=8))
    with pytest.raises(BadInput, match=r"mine\.json.*sequence length 8"):
        chosen(preset, TWO)
    write_profile(path, replace(PROFILE, dtype="bfloat16"))
    with pytest.raises(BadInput, match="measured in bfloat16"):
        chosen(preset, TWO)


@pytest.mark.parametrize("other", [{"planner": "even"}, {"plan": Path("plan.json")}])
def test_a_profile_that_nobody_would_read_is_refused(planning: Preset, other: dict):
    preset = but(planning, profile=Path("p.json"), **other)
    with pytest.raises(BadInput, match=r"--profile p\.json with --plan"):
        check_config(preset.config)


def test_devices_that_nobody_describes_are_left_to_the_even_planner(planning: Preset):
    odd = Cluster(name="odd", nodes=(Node(name="odd-0", device="odd", count=2),))
    with pytest.raises(BadInput, match="--planner even"):
        chosen(planning, odd)
    assert chosen(but(planning, planner="even"), odd).plan.replicas


@pytest.mark.usefixtures("quick_compiling")
def test_a_run_that_planned_goes_on_with_its_plan(planning: Preset, tmp_path: Path):
    one = Cluster(name="one", nodes=(Node(name="h20-0", device="H20", count=1),))
    (tmp_path / "one.toml").write_text(cluster_toml(one))
    planning = but(planning, cluster=tmp_path / "one.toml")
    first = but(planning, stop_after=1, steps=2)
    assert run(first.config, first, MODEL) == 4
    plan = read_plan(planning.config.run_dir / "plan.json")
    assert plan.predicted is not None
    spot = replace(one.nodes[0], spot=True, price_per_hour=2.0)
    (tmp_path / "one.toml").write_text(cluster_toml(replace(one, nodes=(spot,))))
    again = but(planning, steps=2)
    assert run(again.config, again, MODEL) == 0
    assert read_plan(planning.config.run_dir / "plan.json") == plan
    events = [e["event"] for e in lines(planning.config.run_dir / "events.jsonl")]
    assert "replanned" not in events and "restored" in events


def test_only_real_memory_is_a_limit():
    gpu, cpu = TINY.nodes[0], Node(name="cpu-0", device="cpu", count=2)
    assert known_memory_bytes(gpu) == pytest.approx(0.9 * 80 * 2**30)
    assert known_memory_bytes(cpu) == float("inf")
    assert known_memory_bytes(replace(cpu, memory_gib=2.0)) == 2 * 2**30
    assert known_memory_bytes(replace(cpu, device="odd")) == float("inf")


def _short(num_gib: float) -> Cluster:
    nodes = (replace(node, memory_gib=num_gib) for node in TINY.nodes)
    return replace(TINY, nodes=tuple(nodes))


@pytest.mark.parametrize("plan", [ONE_REPLICA, TWO_REPLICAS])
def test_a_given_plan_over_memory_is_refused(planning: Preset, plan, tmp_path: Path):
    write_plan(tmp_path / "given.json", plan)
    given = but(planning, plan=tmp_path / "given.json")
    assert chosen(given).plan == plan
    with pytest.raises(NoFeasiblePlan, match="needs .* bytes"):
        chosen(given, _short(1e-5))


def test_the_command_says_that_nothing_fits_with_exit_code_3(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
    monkeypatch.setitem(PRESETS, "small", small_preset(Path(".")))
    Path("short.toml").write_text(cluster_toml(_short(1e-5)))
    for planner in ("hetjax", "even"):
        arguments = ["small", "--cluster", "short.toml", "--planner", planner]
        assert main(arguments) == 3
        text = capsys.readouterr().err
        parts = [line.partition(":")[0] for line in text.splitlines()]
        assert parts == ["hetjax", "got", "allowed", "fix"], text
        assert not Path("run").exists()
