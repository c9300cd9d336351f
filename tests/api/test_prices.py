# SPDX-License-Identifier: Apache-2.0
"""What is said of prices that nobody knows, where money is asked for."""

import warnings
from typing import Any

import pytest

from hetjax.api import planning
from hetjax.api.planning import find_plan
from hetjax.cluster.cluster import Cluster, Node
from hetjax.report.found import FoundPlan

PRICED, WITHOUT_SPOT, UNPRICED = "L4", "A10G", "H20"  # as in the catalogue
FEW: dict[str, Any] = {
    "global_batch": 8,
    "microbatch_sizes": (4,),
    "tensor": (1,),
    "remat": ("none",),
    "quiet": True,
}


@pytest.fixture(autouse=True)
def only_quick_searches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "LOCAL_SEARCH_S", 0.0)


def found_on(*devices: str, price: float | None = None, **asked: Any) -> FoundPlan:
    nodes = tuple(
        Node(name=device, device=device, count=1, spot=True, price_per_hour=price)
        for device in devices
    )
    return find_plan("tiny", cluster=Cluster(name="c", nodes=nodes), **FEW, **asked)


@pytest.mark.parametrize("asked", [{"objective": "cost"}, {"max_usd_per_hour": 99.0}])
def test_kinds_without_a_price_are_named_and_not_used(asked: dict[str, Any]):
    with pytest.warns(UserWarning) as heard:
        found = found_on(PRICED, WITHOUT_SPOT, UNPRICED, **asked)
    said = [str(warning.message) for warning in heard]
    assert any(f"no price for {UNPRICED}: planned without" in line for line in said)
    assert any(f"no spot price for {WITHOUT_SPOT}: the price on" in x for x in said)
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
