# SPDX-License-Identifier: Apache-2.0
"""Which price of a device counts: its node's, the catalogue's, or electricity."""

import tomllib
from typing import Any

import pytest

from hetjax.cluster import catalogue
from hetjax.cluster.cluster import Node
from hetjax.cluster.prices import device_price, is_priced_on_demand, pays_electricity

FILE = tomllib.loads(catalogue._FILE.read_text(encoding="utf-8"))
KWH = 0.25  # USD
# in the file: prices on demand and spot, on demand only, watts only, neither
BOTH, WITHOUT_SPOT, OWNED, BARE = "A100-SXM4-80GB", "L40S", "RTX-A6000", "H20"


def price(device: str, **said: Any) -> tuple[float, str, str] | None:
    usd_per_kwh = said.pop("usd_per_kwh", None)
    found = device_price(Node(name="n", device=device, count=4, **said), usd_per_kwh)
    return found and (found.usd_per_hour, found.basis, found.source)


def listed(device: str, key: str) -> tuple[float, str]:
    value, source = FILE["device"][device][key]
    return value, FILE["sources"][source]


def test_the_price_of_spot_is_the_catalogues_and_says_of_when_it_is():
    usd, source = listed(BOTH, "spot_price_per_hour")
    assert price(BOTH, spot=True, usd_per_kwh=KWH) == (usd, "spot", source)
    usd, source = listed(BOTH, "price_per_hour")
    assert price(BOTH, usd_per_kwh=KWH) == (usd, "on demand", source)
    usd, source = listed(WITHOUT_SPOT, "price_per_hour")
    assert price(WITHOUT_SPOT, spot=True) == (usd, "on demand", source)


@pytest.mark.parametrize("device", [BOTH, WITHOUT_SPOT, OWNED, BARE, "prototype"])
def test_a_nodes_own_price_goes_first(device: str):
    found = price(device, spot=True, price_per_hour=10.0, usd_per_kwh=KWH)
    assert found and found[:2] == (2.5, "own")  # a quarter of the node


@pytest.mark.parametrize(
    ("device", "said", "usd"),
    [
        (OWNED, {}, 0.3 * KWH),  # 300 W
        ("RTX A6000", {"spot": True}, 0.3 * KWH),
        (OWNED, {"price_per_hour": 0.0}, 0.3 * KWH),
        (BOTH, {"price_per_hour": 0.0}, 0.4 * KWH),  # 400 W; owned, not rented
    ],
)
def test_who_is_paid_by_nobody_costs_electricity(
    device: str, said: dict[str, Any], usd: float
):
    found = price(device, usd_per_kwh=KWH, **said)
    assert found and found[0] == pytest.approx(usd) and found[1] == "electricity"
    assert "0.25 USD per kWh" in found[2]
    alone = price(device, **said)
    assert alone is None or alone[:2] == (0.0, "own")


def test_without_watts_there_is_no_electricity():
    assert price(BARE, usd_per_kwh=KWH) is None
    found = price(BARE, price_per_hour=0.0, usd_per_kwh=KWH)
    assert found and found[:2] == (0.0, "own")


@pytest.mark.parametrize(
    ("device", "said", "on_demand", "electricity"),
    [
        (BOTH, {"spot": True}, False, False),
        (WITHOUT_SPOT, {"spot": True}, True, False),
        (WITHOUT_SPOT, {}, False, False),
        (WITHOUT_SPOT, {"spot": True, "price_per_hour": 1.0}, False, False),
        (WITHOUT_SPOT, {"price_per_hour": 0.0}, False, True),
        (OWNED, {"spot": True}, False, True),
        (BARE, {}, False, True),
    ],
)
def test_what_is_warned_of(
    device: str, said: dict[str, Any], on_demand: bool, electricity: bool
):
    node = Node(name="n", device=device, count=1, **said)
    assert is_priced_on_demand(node) == on_demand
    assert pays_electricity(node) == electricity
