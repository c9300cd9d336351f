# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.plan`: what it prints and writes, what it refuses, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax import simulate
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.models.model import tensor_sizes
from hetjax.models.presets import MODEL_CONFIGS, model_preset
from hetjax.plan import main
from hetjax.plans.plan_files import read_plan
from hetjax.plans.validation import validate_plan
from hetjax.schedule.bound import LowerBound
from hetjax.training.settings.presets import PRESETS
from tests.report.html_page import Page, assert_needs_nothing_else
from tests.training.small import MODEL_CONFIG, small_preset

CLUSTER = Cluster(
    name="mix <b>&",
    nodes=(
        Node(name="east-0", device="H20", count=2, zone="east", price_per_hour=6.0),
        Node(
            name="west-0",
            device="V100-SXM2-32GB",
            count=2,
            zone="west",
            price_per_hour=1.0,
        ),
    ),
    links=(Link(between=("east", "west"), bandwidth_gbit_per_s=10.0),),
)
FEW = ("--tensor", "1", "--microbatch-sizes", "2", "--remat", "none")
GIVEN = ("small", "--cluster", "cluster.toml", *FEW)
ALONE = (*GIVEN, "--compare", "none")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a cluster, where `small` is a model and a preset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
    (tmp_path / "preset").mkdir()
    monkeypatch.setitem(PRESETS, "small", small_preset(tmp_path / "preset"))
    write_cluster(CLUSTER)
    return tmp_path


def write_cluster(cluster: Cluster) -> None:
    Path("cluster.toml").write_text(cluster_toml(cluster))


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(arguments) == code
    out, text = capsys.readouterr()
    parts = [line.partition(":")[0] for line in text.splitlines()[-4:]]
    assert (parts, out) == (["hetjax", "got", "allowed", "fix"], ""), text
    return text


def test_the_plan_takes_as_long_as_simulate_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    found = told(capsys, *ALONE, "--out", "plan.json")
    options = ["--cluster", "cluster.toml", "--model", "small", "--dtype", "float32"]
    assert simulate.main(["plan.json", *options, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    for key in ("step_time_s", "tokens_per_s", "bubble_share"):
        # simulate does not know the preset's optimizer, and assumes Adam
        assert found[key] == pytest.approx(simulated[key], rel=1e-5), key
    assert [s["layers"] for s in found["stages"]] == [
        s["layers"] for s in simulated["stages"]
    ]
    assert found["devices"].keys() == simulated["devices"].keys()
    predicted = read_plan("plan.json").predicted
    assert predicted is not None
    for key in ("step_time_s", "lower_bound_s", "gap", "tokens_per_s"):
        assert getattr(predicted, key) == found[key], key


def test_numbers_follow_from_one_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    found = told(capsys, *ALONE)
    step_s = found["step_time_s"]
    assert 0 < found["lower_bound_s"] <= step_s
    assert found["gap"] == pytest.approx(step_s / found["lower_bound_s"] - 1)
    assert found["tokens_per_s"] == pytest.approx(6 * 16 / step_s)
    used = {(stage["node"], d) for stage in found["stages"] for d in stage["devices"]}
    idle = {(node, d) for node, ds in found["idle_devices"].items() for d in ds}
    shown = [entry["devices"] for entry in found["idle"]]
    told_idle = {(node, d) for some in shown for node, ds in some.items() for d in ds}
    assert told_idle == idle
    assert used | idle == {(n.name, d) for n in CLUSTER.nodes for d in range(n.count)}
    assert not used & idle
    tokens_per_usd = found["tokens_per_s"] * 3600 / found["usd_per_hour"]
    assert found["usd_per_million_tokens"] == pytest.approx(1e6 / tokens_per_usd)
    assert found["goodput"] == 1.0  # no node is said to vanish
    assert found["binds"]["what"] in ("compute", "link", "fill")
    assert found["plan"]["global_batch"] == 6
    assert "baselines" not in found and "pareto" not in found


def test_the_tables_tell_stages_memory_the_bound_and_baselines(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*GIVEN, "--compare", "megatron", "varuna"]) == 0
    out, error = capsys.readouterr()
    lines = [x for x in out.splitlines() if not x.startswith("warning: ")]
    assert lines[0] == "small: 6 sequences of 16 tokens per step, schedule h1f1b"
    assert lines[1] == "times: estimated from the device catalogue, float32"
    assert lines[3].split()[:4] == ["replica", "stage", "node", "devices"]
    bars = re.findall(r"\|([#=+\-.]*)\|", out)
    assert bars and {len(bar) for bar in bars} == {40}
    assert re.search(r"step time \d\.\d{3} ms, [\d,]+ tokens/s", out)
    assert re.search(r"lower bound .* ms \(gap .*%\): no plan of these choices", out)
    assert "1F1B family, fused backward, no interleaving, the modelled costs" in out
    rows = [line.split() for line in lines]
    ours = next(float(row[1]) for row in rows if row[:1] == ["hetjax"])
    for name in ("megatron", "varuna"):
        row = next(row for row in rows if row[:1] == [name])
        # "as fast", or "1.23x as fast"
        times = 1.0 if row[2] == "as" else float(row[2].rstrip("x"))
        assert times == pytest.approx(float(row[1]) / ours, abs=0.02)
    assert "whale" not in out
    assert "megatron, varuna" in error  # progress, apart from results


def test_all_baselines_are_compared_on_small_clusters(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    found = told(capsys, *GIVEN)
    names = {"megatron", "whale", "hapt", "autohet", "varuna", "uniform-search"}
    assert set(found["baselines"]) == names
    for name, judged in found["baselines"].items():
        if judged["step_time_s"] is None:
            assert judged["why"], name
        elif name in ("megatron", "varuna"):  # same space as the plan's
            assert judged["step_time_s"] >= found["lower_bound_s"]


@pytest.mark.nightly
def test_other_wishes_and_other_clusters_are_told_when_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    found = told(capsys, *ALONE, "--pareto", "--what-if")
    assert list(found["pareto"]) == ["time", "cost", "goodput"]
    best = found["pareto"]
    usd = {wish: best[wish]["usd_per_million_tokens"] for wish in best}
    assert usd["cost"] <= usd["time"]
    assert best["time"]["step_time_s"] <= best["cost"]["step_time_s"]
    assert found["step_time_s"] == best["time"]["step_time_s"]
    cases = found["what_if"]
    assert set(cases) == {
        "as it is",
        "one more H20 node",
        "one more V100-SXM2-32GB node",
        "one H20 node fewer",
        "one V100-SXM2-32GB node fewer",
    }
    now = cases["as it is"]["tokens_per_s"]
    assert cases["one more H20 node"]["tokens_per_s"] >= now
    assert cases["one H20 node fewer"]["tokens_per_s"] <= now
    assert main([*ALONE, "--pareto", "--what-if"]) == 0
    out = capsys.readouterr().out
    assert "best by" in out and "one H20 node fewer" in out


def test_staying_with_a_plan_moves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told(capsys, *ALONE, "--output", "now.json")
    options = ["--from", "now.json", "--cluster", "cluster.toml", "--dtype", "float32"]
    found = told(capsys, *options, *FEW, "--compare", "none")
    assert (
        found["plan"]["replicas"]
        == json.loads(Path("now.json").read_text())["replicas"]
    )
    assert (found["moved_bytes"], found["move_s"]) == (0, 0)


def test_a_lost_node_is_planned_around(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told(capsys, *ALONE, "--output", "now.json")
    used = read_plan("now.json").replicas[0].stages[0].node
    left = tuple(node for node in CLUSTER.nodes if node.name != used)
    write_cluster(Cluster(name="left", nodes=left))
    found = told(
        capsys, *GIVEN, "--from", "now.json", "--compare", "none", "--output", "o.json"
    )
    assert {stage["node"] for stage in found["stages"]} == {left[0].name}
    assert found["moved_bytes"] >= 0 and found["move_s"] >= 0
    assert read_plan("o.json").predicted is not None


def test_the_report_is_one_page_that_needs_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*GIVEN, "--compare", "varuna", "--report", "plan.html"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("report: plan.html\n")
    text = Path("plan.html").read_text()
    assert_needs_nothing_else(text)
    page = Page(text)
    assert not page.all("b>&")
    told = " ".join(page.words)
    assert "east-0" in told
    for words in (
        "Plan for small on mix <b>&",
        "no interleaving, the modelled costs",
        "python -m hetjax.plan small --cluster cluster.toml --tensor 1",
        "varuna",
    ):
        assert words in told, words
    # everything that the terminal prints about the step
    for line in out.splitlines():
        if "binds:" in line or line.startswith("lower bound"):
            assert line in told, line


def test_pictures_of_the_layout_are_drawn_when_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*ALONE, "--plot", "layout.svg"]) == 0
    assert "picture: layout.svg" in capsys.readouterr().out
    assert "east-0" in Path("layout.svg").read_text()


@pytest.mark.nightly  # `tests/planner/search/test_find.py` has such a limit, too
def test_a_limit_on_the_price_is_kept_to(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    free = told(capsys, *ALONE)
    cheap = told(capsys, *ALONE, "--max-usd-per-hour", "3.1")
    assert free["usd_per_hour"] > 3.1 >= cheap["usd_per_hour"]
    assert cheap["step_time_s"] > free["step_time_s"]


def _nothing(folder: Path) -> None: ...


def _without_prices(folder: Path) -> None:
    node = Node(
        name="own-0",
        device="own",
        count=2,
        peak_tflops=1.0,
        memory_gib=1.0,
        memory_gb_per_s=1.0,
        intra_node_gb_per_s=1.0,
        network_gbit_per_s=1.0,
    )
    write_cluster(Cluster(name="own", nodes=(node,)))


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (_nothing, [], ["nothing to plan", "hetjax.plan tiny"]),
        (_nothing, ["smal"], ["preset 'smal'", "did you mean 'small'?"]),
        (
            _nothing,
            ["--model", "small"],
            ["no --global-batch and no", "add --global-batch 128 --seq-len 2048, say"],
        ),
        (
            _nothing,
            ["--seq-len", "4"],
            ["no --model and no --global-batch\n", "a preset's name"],
        ),
        (_nothing, [*GIVEN, "--model", "smal"], ["model preset 'smal'"]),
        (_nothing, [*GIVEN, "--seq-len", "32"], ["seq_len = 32", "<= 16"]),
        (_nothing, [*GIVEN, "--global-batch", "0"], ["global_batch = 0"]),
        (_nothing, [*GIVEN, "--cluster", "no.toml"], ["'no.toml'", "No such file"]),
        (_nothing, [*GIVEN, "--profile", "no.json"], ["'no.json'", "No such file"]),
        (_nothing, [*GIVEN, "--from", "no.json"], ["'no.json'", "No such file"]),
        (_nothing, [*GIVEN, "--tensor", "0"], ["--tensor 0", "numbers from 1"]),
        (_nothing, [*GIVEN, "--tensor", "3"], ["tensor degrees 3", "give --tensor 1"]),
        (
            _nothing,
            [*GIVEN, "--tensor", "1,x"],
            ["--tensor 1,x", "a whole number from 0, or"],
        ),
        (_nothing, [*GIVEN, "--tensor"], ["--tensor without a value", "a whole"]),
        (_nothing, [*GIVEN, "--remat", "some"], ["--remat some", "selective"]),
        (_nothing, [*GIVEN, "--objective", "speed"], ["--objective speed", "goodput"]),
        (_nothing, [*GIVEN, "--compare", "megatrom"], ["'megatron'?", "or none"]),
        (_nothing, [*GIVEN, "--form", "x"], ["'--form'", "did you mean '--from'?"]),
        (_nothing, [*GIVEN, "--deadline-hours", "9"], ["without --tokens", "300e9"]),
        (_nothing, [*GIVEN, "--deadline-hours", "0"], ["--deadline-hours 0", "above"]),
        (_nothing, [*GIVEN, "--max-usd-per-hour", "nan"], ["--max-usd-per-hour nan"]),
        (_nothing, [*GIVEN, "--recovery-s", "-1"], ["--recovery-s -1", "from 0"]),
        (_nothing, [*GIVEN, "--report", "no/p.html"], ["--report no/p.html", "mkdir"]),
        (_nothing, [*GIVEN, "--out", "no/plan.json"], ["--output no/plan.json"]),
        (_nothing, [*GIVEN, "--plot", "plan.jpg"], ["'plan.jpg'", ".svg"]),
        (
            _without_prices,
            [*GIVEN, "--objective", "cost"],
            ["--objective cost", "no node", "price_per_hour"],
        ),
        (
            _without_prices,
            [*GIVEN, "--max-usd-per-hour", "3"],
            ["--max-usd-per-hour 3", "price_per_hour"],
        ),
    ],
)
def test_bad_input_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    arguments: list[str],
    words: list[str],
):
    spoil(folder)
    before = sorted(folder.rglob("*"))
    text = refused(capsys, 2, *arguments)
    assert all(word in text for word in words), text
    assert sorted(folder.rglob("*")) == before


@pytest.mark.nightly
def test_a_move_is_by_the_objective_within_the_limits_and_has_a_bound(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told(capsys, *ALONE, "--output", "now.json")
    going_on = (*ALONE, "--from", "now.json")
    fast = told(capsys, *going_on)
    assert 0 < fast["lower_bound_s"] <= fast["step_time_s"]
    cheap = told(capsys, *going_on, "--objective", "cost")
    assert cheap["usd_per_million_tokens"] < fast["usd_per_million_tokens"]
    within = told(capsys, *going_on, "--max-usd-per-hour", "3.1")
    assert fast["usd_per_hour"] > 3.1 >= within["usd_per_hour"]
    text = refused(capsys, 3, *going_on, "--deadline-hours", "1", "--tokens", "1e15")
    assert "within 1 hours for 1e+06 billion tokens" in text
    text = refused(capsys, 2, *going_on, "--pareto")
    assert "--from now.json with --pareto" in text


def test_a_search_that_has_no_time_ends_with_what_there_is_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    long = told(capsys, *ALONE)
    found = told(
        capsys, *GIVEN, "--pareto", "--what-if", "--search-s", "1e-6", "--out", "p.json"
    )
    assert (long["ended"], found["ended"]) == (None, "search_s")
    assert 0 < found["lower_bound_s"] <= long["step_time_s"] <= found["step_time_s"]
    assert {"megatron", "one more H20 node"} <= set(found["left_out"])
    assert read_plan("p.json").predicted is not None
    assert main([*GIVEN, "--search-s", "1e-6"]) == 0
    out = capsys.readouterr().out
    assert "ended after --search-s: the best plan so far" in out
    assert "no time was left for: megatron, whale" in out


def test_what_a_search_did_in_its_time_is_done_again_by_its_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*GIVEN, "--search-s", "0.3", "--out", "timed.json"]) == 0
    typed = re.search(r"--search-work [\d,]+", capsys.readouterr().out)
    assert typed is not None
    assert main([*GIVEN, *typed[0].split(), "--out", "again.json"]) == 0
    assert "ended after --search-work: the best plan so far" in capsys.readouterr().out
    assert read_plan("again.json") == read_plan("timed.json")
    text = refused(capsys, 2, *GIVEN, *typed[0].split(), "--search-s", "1")
    assert "--search-s 1 with --search-work" in text
    text = refused(capsys, 2, *GIVEN, "--search-work", "5,4")
    assert "--search-work 5,4" in text and "in ascending order" in text


def test_libraries_beneath_print_nothing_of_their_own(tmp_path: Path):
    (tmp_path / "cluster.toml").write_text(cluster_toml(CLUSTER))
    options = "--cluster cluster.toml --compare autohet --json"
    done = subprocess.run(
        [sys.executable, "-m", "hetjax.plan", "tiny", *options.split(), *FEW],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # a C library bypasses Python's streams
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["baselines"].keys() == {"autohet"}


def test_ctrl_c_ends_with_the_best_plan_so_far(tmp_path: Path):
    kinds = ("A100-SXM4-40GB", "V100-SXM2-16GB", "T4", "L4")
    nodes = tuple(Node(name=f"n-{kind}", device=kind, count=4) for kind in kinds)
    cluster = Cluster(name="four", nodes=nodes)
    (tmp_path / "four.toml").write_text(cluster_toml(cluster))
    options = "--model llama-1b --global-batch 128 --seq-len 2048 --pareto --what-if"
    process = subprocess.Popen(
        [sys.executable, "-m", "hetjax.plan", "--cluster", "four.toml"]
        + [*options.split(), "--output", "plan.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr
    while "best so far" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=180)
    assert process.returncode == 0, error
    assert "ending with the best plan so far" in error
    assert "ended by Ctrl-C: the best plan so far\nplan: plan.json\n" in out
    model = model_preset("llama-1b")
    plan = read_plan(tmp_path / "plan.json")
    sizes = tensor_sizes(model)
    validate_plan(plan, cluster, len(model.layers), sizes, model.max_seq_len)


def test_a_plan_below_its_bound_is_shown_and_the_command_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "hetjax.planner.bound.certificate.proved",
        lambda request, longest_s, space: LowerBound(step_s=1e3),
    )
    with pytest.raises(SystemExit, match="internal error.*1000") as ended:
        main([*ALONE, "--json"])
    assert isinstance(ended.value.code, str)  # to standard error, and exit code 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_time_s"] > 0
    assert plan["lower_bound_s"] is None
    assert "internal error" in plan["why_no_bound"]


def test_a_model_that_fits_nowhere_has_no_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    nodes = tuple(replace(node, memory_gib=1e-5) for node in CLUSTER.nodes)
    write_cluster(replace(CLUSTER, nodes=nodes))
    text = refused(capsys, 3, *GIVEN, "--output", "never.json", "--report", "no.html")
    assert "no plan for 'small'" in text and "memory" in text
    assert not list(folder.glob("n*.*"))


def test_a_limit_that_no_plan_keeps_to_has_no_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = refused(capsys, 3, *GIVEN, "--max-usd-per-hour", "0.01")
    assert "0.01 USD per hour" in text


def test_a_file_that_cannot_be_written_is_told_after_the_tables(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "taken").mkdir()
    assert main([*ALONE, "--output", "taken"]) == 2
    out, text = capsys.readouterr()
    assert "step time" in out
    assert "Is a directory" in text and "another path" in text


def test_the_help_tells_options_presets_and_exit_codes(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit) as ended:
        main(["--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--max-usd-per-hour" in text and "--from" in text and "tiny" in text
    assert "3 no plan fits" in text
