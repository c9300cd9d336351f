# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.demo`: its figures are the simulator's, ranked by them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hetjax
from hetjax import simulate
from hetjax.cli import demo
from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.demo import main
from hetjax.models.model import tensor_sizes
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.planner.model.deadline import left_s
from hetjax.planner.search.contest import CONTESTANTS
from hetjax.plans.even import even_plan
from hetjax.plans.plan import Plan, Remat
from hetjax.plans.plan_files import parse_plan
from hetjax.plans.validation import validate_plan
from hetjax.report.race.race import Race, RaceEntry
from tests.training.small import MODEL, MODEL_CONFIG

CLUSTER = Cluster(
    name="pair",
    nodes=(
        Node(name="v-0", device="V100-SXM2-32GB", count=2),
        Node(name="h-0", device="H20", count=3),
    ),
)
SIZES = ("--model", "small", "--global-batch", "12", "--seq-len", "16")
GIVEN = ("--cluster", "cluster.toml", *SIZES)
KIND = {node.name: node.device for node in CLUSTER.nodes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a cluster, where `small` is a model."""
    path = tmp_path_factory.mktemp("demo")
    (path / "cluster.toml").write_text(cluster_toml(CLUSTER))
    nodes = tuple(replace(node, memory_gib=1e-5) for node in CLUSTER.nodes)
    small = Cluster(name="small", nodes=nodes)
    (path / "small.toml").write_text(cluster_toml(small))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
        yield path


@pytest.fixture(scope="module")
def raced(folder: Path) -> dict:
    """The output of `demo --json`; the plans are in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        out: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: out.extend(map(str, words)))
        assert main([*GIVEN, "--json", "--output", "plans"]) == 0
    (line,) = out
    return json.loads(line)


def used(planner: dict) -> set[tuple[str, int]]:
    plan = parse_plan(json.dumps(planner["plan"]))
    return {(stage.node, d) for _, _, stage in plan.stages() for d in stage.devices}


def test_every_figure_is_what_simulate_says_of_the_plan(
    raced: dict, capsys: pytest.CaptureFixture[str]
):
    files = {path.stem: path for path in Path("plans").iterdir()}
    assert len(files) == len(raced["planners"]) == 9
    for name, told in raced["planners"].items():
        file = files[re.sub("[^a-z]", "-", name.lower())]
        assert simulate.main([str(file), "--cluster", "cluster.toml", "--json"]) == 0
        simulated = json.loads(capsys.readouterr().out)
        for key in ("tokens_per_s", "step_time_s"):
            assert told[key] == pytest.approx(simulated[key], rel=1e-12), (name, key)
        even = raced["planners"]["even split"]["tokens_per_s"]
        assert told["times_even"] == pytest.approx(simulated["tokens_per_s"] / even)


def test_every_plan_is_valid_and_counts_the_devices_that_it_uses(raced: dict):
    assert raced["num_devices"] == 5
    for name, told in raced["planners"].items():
        plan = parse_plan(json.dumps(told["plan"]))
        sizes = tensor_sizes(MODEL)
        validate_plan(plan, CLUSTER, len(MODEL.layers), sizes, MODEL.max_seq_len)
        assert told["num_devices"] == len(used(told)), name
        assert (plan.global_batch, plan.seq_len, plan.model) == (12, 16, "small")


@pytest.mark.nightly
def test_the_fastest_kind_alone_is_of_the_kind_whose_best_plan_is_fastest(raced: dict):
    alone = raced["planners"]["fastest kind alone"]
    (kind,) = {KIND[node] for node, _ in used(alone)}
    best = {}
    for node in CLUSTER.nodes:
        found = hetjax.find_plan(
            model=MODEL,
            cluster=part_of(CLUSTER, [node.name]),
            global_batch=12,
            seq_len=16,
            quiet=True,
        )
        best[node.device] = found.tokens_per_s
    assert best[kind] == max(best.values())
    assert alone["tokens_per_s"] == pytest.approx(best[kind])
    assert kind in alone["about"]


def evenly(size: int, tensor: int, remat: Remat) -> Plan:
    return even_plan(
        CLUSTER,
        model="small",
        num_layers=len(MODEL.layers),
        seq_len=16,
        global_batch=12,
        microbatch_size=size,
        tensor=tensor,
        tensor_sizes=tensor_sizes(MODEL),
        remat=remat,
    )


def test_the_even_split_is_the_fastest_that_train_could_be_asked_for(raced: dict):
    told = raced["planners"]["even split"]
    speeds = []
    for size in (1, 2, 4):
        for tensor in (1, 2):
            for remat in ("none", "selective", "full"):
                plan = evenly(size, tensor, remat)
                step = hetjax.simulate_plan(
                    plan, model=MODEL, cluster=CLUSTER, quiet=True
                )
                speeds.append(step.tokens_per_s)
    assert told["tokens_per_s"] == pytest.approx(max(speeds))
    replicas = parse_plan(json.dumps(told["plan"])).replicas
    assert len({(r.num_microbatches, len(r.stages)) for r in replicas}) == 1


def test_without_a_terminal_each_planner_has_a_line_best_first(
    folder: Path, raced: dict, capsys: pytest.CaptureFixture[str]
):
    assert main([*GIVEN, "--seconds", "60"]) == 0  # returns earlier
    out, told = capsys.readouterr()
    assert "\x1b" not in out + told
    lines = out.splitlines()
    shown = {}
    for name, planner in raced["planners"].items():
        (line,) = (line for line in lines if line.startswith(f"{name}  "))
        figures = re.match(
            r"([\d,]+) +([\d.]+)x +(\d) of 5 ", line[len(name) :].lstrip()
        )
        assert figures, line
        speed, factor, num = figures.groups()
        shown[lines.index(line)] = int(speed.replace(",", ""))
        assert shown[lines.index(line)] == round(planner["tokens_per_s"])
        assert float(factor) == pytest.approx(planner["times_even"], abs=0.006)
        assert int(num) == planner["num_devices"]
        assert f"planning: {name}" in told.splitlines()
    in_order = [shown[at] for at in sorted(shown)]
    assert in_order == sorted(in_order, reverse=True)
    assert lines[-1] == "picture: demo.png"
    assert Path("demo.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    Path("demo.png").unlink(missing_ok=True)
    assert main(GIVEN) == 0
    assert "pip install 'hetjax[plot]'" in capsys.readouterr().out.splitlines()[-1]
    assert not Path("demo.png").exists()


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ("--seconds", "61")),
        (2, ("--search-s", "0")),
        (2, ("--global-batch", "0")),
        (2, ("--cluster", "nowhere.toml")),
        (2, ("--output", "cluster.toml")),
        (3, ("--cluster", "small.toml")),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(
    folder: Path,
    code: int,
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
):
    assert main([*GIVEN, *arguments]) == code
    out, told = capsys.readouterr()
    parts = [line.partition(":")[0] for line in told.splitlines()[-4:]]
    assert (parts, out) == (["hetjax", "got", "allowed", "fix"], ""), told


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the race of the named planners by one plan, at once."""
    plan = evenly(1, 1, "none")
    step = hetjax.simulate_plan(plan, model=MODEL, cluster=CLUSTER, quiet=True)
    entries = tuple(
        RaceEntry(name=name, about="", judged=step.predicted)
        for name in ("even split", "fastest kind alone", "hetjax")
    )
    race = Race(cluster=CLUSTER, entries=entries)
    monkeypatch.setattr("hetjax.api.racing.race_planners", lambda **_: race)


@pytest.mark.usefixtures("no_search")
def test_a_picture_that_nobody_named_and_that_cannot_be_ends_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    Path("demo.png").unlink(missing_ok=True)
    Path("demo.png").mkdir()
    try:
        assert main([*GIVEN, "--output", "kept"]) == 0
    finally:
        Path("demo.png").rmdir()
    *_, plans, picture = capsys.readouterr().out.splitlines()
    assert plans == "plans: kept" and len(list(Path("kept").iterdir())) == 3
    assert picture.startswith("no picture: ") and "demo.png" in picture
    assert picture.endswith("; --plot FILE draws it elsewhere")


@pytest.mark.usefixtures("no_search")
def test_a_picture_without_room_is_named_and_plans_are_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    Path("full.png").symlink_to("/dev/full")
    assert main([*GIVEN, "--output", "there", "--plot", "full.png"]) == 2
    assert "got: full.png: No space left on device" in capsys.readouterr().err
    assert len(list(Path("there").iterdir())) == 3


def test_where_nobody_has_a_plan_in_time_more_of_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    left: list[float] = []

    def nobody(request: object, begins: object) -> Iterator[tuple[str, None]]:
        left.append(left_s())
        yield from ((name, None) for name in CONTESTANTS)

    monkeypatch.setattr("hetjax.api.racing.contest", nobody)
    assert main([*GIVEN, "--search-s", "7"]) == 2
    assert 0 < left[0] <= 7
    told = capsys.readouterr().err
    assert "got: --search-s 7, in which no planner found a plan" in told
    assert "fix: give --search-s 28" in told


def test_without_time_nobody_is_said_to_have_a_plan_who_has_none(folder: Path):
    from hetjax.api.racing import race_planners

    race = race_planners(
        model=MODEL, cluster=CLUSTER, global_batch=12, seq_len=16, search_s=0.0
    )
    without = [entry for entry in race.entries if entry.plan is None]
    assert {race.row(entry)[1:] for entry in without} <= {
        ("no plan", "", "", "no time was left")
    }
    assert race.entry("even split").plan is not None
