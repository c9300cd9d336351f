# SPDX-License-Identifier: Apache-2.0
"""Results of the public functions state what commands state, and display themselves."""

import json
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

import hetjax
from hetjax import plan, simulate
from hetjax.api.plan_config import PlanConfig, PlannedOptimizer
from hetjax.api.planning import find_plan
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.measured.layer_profile import (
    LinkMeasurement,
    Measurement,
    Profile,
    write_profile,
)
from hetjax.errors import BadInput
from hetjax.models.model import parameter_count
from hetjax.planner.model.request import REMATS
from hetjax.planner.search.comparison import MOST_COMPARED, Questions
from hetjax.plans.plan import Plan, Remat
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.report.found import FoundPlan
from hetjax.report.html.plan_page import plan_page
from hetjax.report.measured import MeasuredProfile
from tests.report.html_page import Page

KINDS = {"p.svg": b"<?xml", "p.png": b"\x89PNG", "p.PDF": b"%PDF"}
CLUSTER = Cluster(
    name="pair",
    nodes=(
        Node(name="a", device="L4", count=1, price_per_hour=1.0),
        Node(name="b", device="H20", count=1, price_per_hour=2.0),
    ),
    links=(Link(between=("a", "b"), bandwidth_gbit_per_s=10.0),),
)
FEW: dict[str, Any] = {
    "global_batch": 8,
    "microbatch_sizes": (4,),
    "remat": ("none",),
    "quiet": True,
}
TYPED = ["--global-batch", "8", "--microbatch-sizes", "4", "--remat", "none"]


class Text(HTMLParser):
    """The words of a page, and its frames."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.frames = "", list[str]()
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.words += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.frames += [value or "" for key, value in attrs if key == "srcdoc"]


@pytest.fixture(scope="module")
def found() -> FoundPlan:
    return hetjax.find_plan("tiny", cluster=CLUSTER, **FEW)


def told(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_search_finds_what_the_command_finds(
    found: FoundPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "pair.toml").write_text(cluster_toml(CLUSTER))
    words = ["--cluster", str(tmp_path / "pair.toml"), *TYPED, "--compare", "none"]
    values = told(plan.main, capsys, "tiny", *words)
    clock = {"search_s": 0.0}
    assert found.values() | clock == values | clock
    assert found.step_time_s == values["step_time_s"]
    assert (found.lower_bound_s, found.gap) == (values["lower_bound_s"], values["gap"])
    assert found.tokens_per_s == pytest.approx(8 * 64 / found.step_time_s)
    assert json.loads(plan_json(found.plan)) == values["plan"]
    assert plan.main(["tiny", *words]) == 0
    assert str(found).partition(" in ")[0] in capsys.readouterr().out


def test_a_found_plan_shows_itself_as_the_page_of_the_report(
    found: FoundPlan, tmp_path: Path
):
    (page,) = Text(found._repr_html_()).frames
    found.write_report(tmp_path / "plan.html", "what made it")
    words = Page((tmp_path / "plan.html").read_text(encoding="utf-8")).words
    assert words == [*Page(page).words, "Made with", "what made it"]


def test_without_matplotlib_a_found_plan_shows_its_page_and_draws_no_picture(
    found: FoundPlan, monkeypatch: pytest.MonkeyPatch
):
    shown = found._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert found._repr_html_() == shown
    with pytest.raises(BadInput, match="hetjax\\[plot\\]"):
        found.draw()


def test_a_simulated_step_is_that_of_the_command(
    found: FoundPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "pair.toml").write_text(cluster_toml(CLUSTER))
    hetjax.save_plan(found.plan, tmp_path / "plan.json")
    step = hetjax.simulate_plan(found.plan, cluster=CLUSTER, quiet=True)
    words = [str(tmp_path / "plan.json"), "--cluster", str(tmp_path / "pair.toml")]
    assert step.values() == told(simulate.main, capsys, *words)
    of_file = hetjax.simulate_plan(
        tmp_path / "plan.json", cluster=tmp_path / "pair.toml", quiet=True
    )
    assert of_file.values() == step.values()
    assert simulate.main(words) == 0
    assert capsys.readouterr().out == f"{step}\n"
    said = str(step).split()
    assert sorted(" ".join(Page(step._repr_html_()).words).split()) == sorted(said)
    predicted = step.plan.predicted
    assert predicted is not None and predicted.step_time_s == step.step_time_s
    step.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_pictures_show_themselves_and_are_kept(found: FoundPlan, tmp_path: Path):
    for picture, word in ((found.draw(), "a"), (found.step.draw(), "time (ms)")):
        shown = ElementTree.fromstring(picture._repr_svg_())
        assert "max-width: 100%" in shown.attrib["style"]  # fits a narrow cell
        assert word in [text.strip() for text in shown.itertext()]
        for name, start in KINDS.items():
            picture.save(tmp_path / name)
            assert (tmp_path / name).read_bytes().startswith(start)
        with pytest.raises(BadInput, match="ends in .pdf, .png, .svg"):
            picture.save(tmp_path / "p.jpg")


def test_the_second_best_plan_is_slower_and_is_not_the_best_in_another_order(
    found: FoundPlan,
):
    second = found.planned.second
    assert second is not None
    assert second.simulation.step_time_s >= found.step_time_s

    def cuts(of: Plan) -> list[list[tuple[str, tuple[int, int]]]]:
        stages = [[(s.node, s.layers) for s in r.stages] for r in of.replicas]
        return sorted(stages)

    assert cuts(second.plan) != cuts(found.plan)  # here each kind has one node
    assert "hetjax, second" in Page(plan_page(found.planned)).words


def test_planners_are_compared_by_name(found: FoundPlan):
    compared = hetjax.compare_planners(
        "tiny", cluster=CLUSTER, compare=("megatron",), **FEW
    )
    steps = compared.steps
    assert {"hetjax", "megatron"} <= steps.keys()
    assert steps["hetjax"].step_time_s == min(s.step_time_s for s in steps.values())
    assert compared.best.plan == steps["hetjax"].plan or compared.best.gap is not None
    for name in steps:
        assert name in str(compared) and f"<td>{name}</td>" in compared._repr_html_()


def test_a_plan_shows_its_stages(found: FoundPlan):
    html = found.plan._repr_html_()
    assert html.count("<tr>") == 1 + len(found.plan.stages())
    assert found.plan.title in Text(html).words
    assert parse_plan(plan_json(found.plan)) == found.plan


def test_a_measured_profile_shows_its_rows(tmp_path: Path):
    row = Measurement(
        device="L4",
        kind="head",
        tensor=1,
        microbatch_size=2,
        forward_s=0.001,
        backward_s=0.002,
        update_s=0.003,
    )
    link = LinkMeasurement(
        between=("a", "b"), bandwidth_gbit_per_s=10.0, latency_ms=0.5
    )
    profile = Profile(
        model="tiny",
        seq_len=64,
        dtype="float32",
        layers=("head",),
        measurements=(row,),
        links=(link,),
    )
    measured = MeasuredProfile(profile=profile, path=tmp_path / "p.json")
    write_profile(measured.path, profile)
    assert measured.json() == measured.path.read_text()
    words = Text(measured._repr_html_()).words
    for said in ("L4", "head", "1.000", "2.000", "3.000", "a to b: 10 Gbit/s"):
        assert said in words and said in str(measured)


def test_results_are_frozen(found: FoundPlan):
    for result in (found, found.step, found.plan):
        with pytest.raises((FrozenInstanceError, TypeError)):
            result.planned = None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"objective": "speed"}, "objective"),
        ({"objective": "cost", "tensor": ()}, "--tensor"),
        ({"compare": ("megatorn",)}, "did you mean 'megatron'"),
        ({"cluster": "nowhere"}, "nowhere"),
        ({"profile": "nowhere.json"}, "nowhere.json"),
        ({"current": "nowhere.json"}, "nowhere.json"),
        ({"seq_len": 10**6}, "seq_len"),
    ],
)
def test_what_cannot_be_planned_is_refused(choices: dict[str, Any], said: str):
    with pytest.raises(BadInput, match=said):
        find_plan("tiny", **{"quiet": True, "cluster": CLUSTER, **choices})


def test_a_search_that_is_told_too_little_says_what_is_missing():
    with pytest.raises(BadInput, match="no --model"):
        hetjax.find_plan(cluster=CLUSTER)
    with pytest.raises(BadInput, match="no --global-batch"):
        hetjax.find_plan(model=hetjax.load_model("tiny"), cluster=CLUSTER)


def test_the_optimizer_decides_how_much_memory_a_plan_takes():
    few = {"microbatch_sizes": (4,), "remat": ("none",), "global_batch": 8}
    one = Cluster(name="one", nodes=(Node(name="a", device="L4", count=1),))

    def held_bytes(**settings: Any) -> float:
        rule = PlannedOptimizer(**settings)
        found = find_plan("tiny", cluster=one, quiet=True, optimizer=rule, **few)
        (use,) = found.planned.best.memory.values()
        return use.total_bytes

    layers = hetjax.load_model("tiny").layers
    weights = 4 * sum(map(parameter_count, layers))  # in float32
    usual = held_bytes()
    assert held_bytes(ema=0.999) == pytest.approx(usual + weights, rel=0.01)
    assert held_bytes(name="lion") == pytest.approx(usual - weights, rel=0.01)
    assert held_bytes(state_bits=8) < usual - weights
    with pytest.raises(BadInput, match="8 bits for the moments of adamw"):
        held_bytes(name="muon", state_bits=8)
    with pytest.raises(BadInput, match=r"optimizer\.ema = 2\.0"):
        held_bytes(ema=2.0)


def test_the_choices_of_a_search_are_those_of_the_planner(
    capsys: pytest.CaptureFixture[str],
):
    choices = PlanConfig()
    assert choices.horizon_s == Questions().horizon_s
    assert choices.remat == REMATS == get_args(Remat)
    with pytest.raises(SystemExit):
        plan.main(["--help-all"])
    assert f"up to {MOST_COMPARED} devices" in capsys.readouterr().out
