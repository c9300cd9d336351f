# SPDX-License-Identifier: Apache-2.0
"""Which prices a plan counts, and what is reported about missing prices."""

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest

from hetjax.api import planning
from hetjax.api.planning import find_plan
from hetjax.cluster.catalogue import catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.report.found import FoundPlan
from hetjax.report.html.plan_page import plan_page
from hetjax.report.plans.plan_rows import cost_lines, goodput_lines, wish_rows
from tests.short_runs import draws

PRICED, WITHOUT_SPOT, UNPRICED = "L4", "A10G", "H20"  # as in the catalogue
OWNED = "RTX-A6000"  # 300 W, and not for rent
FEW: dict[str, Any] = {
    "global_batch": 8,
    "microbatch_sizes": (4,),
    "tensor": (1,),
    "remat": ("none",),
    "quiet": True,
}


@pytest.fixture(autouse=True)
def only_quick_searches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "LOCAL_WORK", 0)


def found_on(*devices: str, price: float | None = None, **asked: Any) -> FoundPlan:
    nodes = tuple(
        Node(name=device, device=device, count=1, spot=True, price_per_hour=price)
        for device in devices
    )
    return find_plan("tiny", cluster=Cluster(name="c", nodes=nodes), **FEW, **asked)


@pytest.mark.parametrize(
    "asked", draws([{"objective": "cost"}, {"max_usd_per_hour": 99.0}], short=1)
)
def test_kinds_without_a_price_are_named_and_not_used(asked: dict[str, Any]):
    with pytest.warns(UserWarning) as heard:
        found = found_on(PRICED, WITHOUT_SPOT, UNPRICED, **asked)
    said = [str(warning.message) for warning in heard]
    assert any(
        f"no price for {UNPRICED}: planned without them" in line for line in said
    )
    assert any(
        f"no spot price for {WITHOUT_SPOT}: the on-demand price" in x for x in said
    )
    assert found.plan.nodes <= {PRICED, WITHOUT_SPOT}


@pytest.mark.parametrize(
    ("devices", "asked"),
    [
        ((PRICED,), {"objective": "cost"}),
        ((WITHOUT_SPOT, UNPRICED), {"objective": "cost", "price": 2.0}),
        ((PRICED, UNPRICED), {}),
    ],
)
def test_nothing_is_said_where_prices_are_known_or_not_asked_for(
    devices: tuple[str, ...], asked: dict[str, Any]
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found_on(*devices, **asked)


def test_a_spot_price_is_told_with_where_and_when_it_is_from():
    found = found_on(PRICED)
    spec = catalogue()[PRICED]
    assert found.values()["usd_per_hour"] == spec.spot_price_per_hour
    (line,) = [line for line in str(found).splitlines() if "spot price" in line]
    assert f"{spec.spot_price_per_hour:.4g} USD an hour for one device" in line
    assert spec.sources["spot_price_per_hour"] in line
    assert "spot price" not in str(found_on(PRICED, price=1.0))


def test_electricity_counts_for_what_nobody_is_paid_for():
    found = found_on(OWNED, objective="cost", usd_per_kwh=0.25)
    usd = 0.3 * 0.25  # kW times USD per kWh
    assert found.values()["usd_per_hour"] == pytest.approx(usd)
    per_million = usd / 3600 / found.tokens_per_s * 1e6
    assert found.values()["usd_per_million_tokens"] == pytest.approx(per_million)
    assert f"electricity price of {OWNED}: 0.075 USD an hour" in str(found)
    owned = found_on(PRICED, price=0.0, usd_per_kwh=0.25)
    assert owned.values()["usd_per_hour"] == pytest.approx(0.072 * 0.25)  # 72 W
    paid = found_on(PRICED, price=2.0, usd_per_kwh=0.25)
    assert paid.values()["usd_per_hour"] == 2.0


def test_kinds_without_watts_are_named():
    with pytest.warns(UserWarning, match="no watts for H20: its electricity is not"):
        found_on(PRICED, UNPRICED, usd_per_kwh=0.25)


@pytest.mark.parametrize("usd_per_kwh", [0.0, -0.1, 10.1, float("nan")])
def test_what_electricity_cannot_cost_is_refused(usd_per_kwh: float):
    with pytest.raises(BadInput, match="--usd-per-kwh"):
        found_on(OWNED, usd_per_kwh=usd_per_kwh)


def test_a_plan_by_cost_says_how_much_cheaper_any_could_be():
    found = found_on(PRICED, objective="cost")
    told = found.values()
    least, usd = told["least_usd_per_million_tokens"], told["usd_per_million_tokens"]
    assert 0 < least <= usd and told["cost_gap"] == pytest.approx(usd / least - 1)
    assert f"cost gap {told['cost_gap']:.1%}: no plan of these choices" in str(found)
    assert "<dt>cost gap</dt>" in plan_page(found.planned)
    by_time = found_on(PRICED)
    assert by_time.values()["cost_gap"] is None and "cost gap" not in str(by_time)


def test_where_no_bound_of_cost_is_known_or_it_is_false_that_is_said():
    planned = found_on(PRICED, objective="cost").planned
    usd = planned.best.usd_per_million_tokens
    assert usd is not None
    for least_usd, words in (
        (None, "no bound on cost is known"),
        (usd * 1.001, "internal error: the plan is cheaper than the bound on cost"),
    ):
        found = replace(planned.found, least_usd=least_usd)
        assert words in str(FoundPlan(replace(planned, found=found)))


def test_the_wish_for_cost_has_its_own_gap_beside_others():
    found = found_on(PRICED, WITHOUT_SPOT, pareto=True)
    gaps = {row[0]: row[-1] for row in wish_rows(found.planned)}
    by_cost = found.values()["pareto"]["cost"]
    assert gaps["cost"] == f"{by_cost['cost_gap']:.1%}"
    assert gaps["time"] == f"{found.gap:.1%}"


@pytest.mark.nightly
def test_kinds_without_a_price_do_not_lead_the_search_astray():
    """Many fast devices without a price, beside a cheap kind and an expensive one."""
    cheap = Node(name="cheap", device="T4", count=2, price_per_hour=0.5)
    dear = Node(name="dear", device="V100-SXM2-16GB", count=4, price_per_hour=24.0)
    unpriced = Node(name="unpriced", device=UNPRICED, count=4)
    with pytest.warns(UserWarning, match="planned without them"):
        found = find_plan(
            "tiny",
            cluster=Cluster(name="c", nodes=(unpriced, cheap, dear)),
            objective="cost",
            compare=("none",),
            **FEW,
        )
    alone = find_plan(
        "tiny", cluster=Cluster(name="c", nodes=(cheap,)), objective="cost", **FEW
    )
    usd = alone.values()["usd_per_million_tokens"]
    told = found.values()
    assert found.planned.request.cluster.nodes == (cheap, dear)
    assert found.plan.nodes == {"cheap"}
    assert told["usd_per_million_tokens"] == pytest.approx(usd)
    json.dumps(told, allow_nan=False)  # as `--json` prints them


@pytest.mark.parametrize(
    "wishes", draws([{"objective": "cost", "pareto": True}, {"pareto": True}], short=1)
)
def test_all_figures_are_finite_where_some_have_no_price(wishes: dict[str, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = found_on(PRICED, UNPRICED, **wishes)
    json.dumps(found.values(), allow_nan=False)
    assert "inf%" not in str(found)


@pytest.mark.parametrize("usd", draws([None, 0.0], short=1))
def test_wishes_are_told_apart_where_nothing_has_a_price_or_costs_anything(
    usd: float | None,
):
    nodes = tuple(
        Node(name=name, device=UNPRICED, count=count, price_per_hour=usd)
        for name, count in (("one", 1), ("two", 2))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = find_plan(
            "tiny",
            cluster=Cluster(name="free", nodes=nodes),
            pareto=True,
            compare=("none",),
            **FEW,
        )
    json.dumps(found.values(), allow_nan=False)
    assert {row[0] for row in wish_rows(found.planned)} == {"time", "cost", "goodput"}


def test_a_price_of_electricity_that_changes_nothing_says_so():
    found = found_on("GeForce-RTX-4090", usd_per_kwh=0.3)
    (line,) = [line for line in cost_lines(found.planned) if "--usd-per-kwh" in line]
    assert "on demand price of GeForce-RTX-4090" in line
    assert "price_per_hour = 0" in line


def test_a_plan_for_goodput_says_how_much_is_expected():
    found = found_on(PRICED, objective="goodput")
    (line,) = goodput_lines(found.planned)
    assert line.startswith("expected goodput ")
    assert not list(goodput_lines(found_on(PRICED).planned))
