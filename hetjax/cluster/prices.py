# SPDX-License-Identifier: Apache-2.0
"""Finds the price per hour of a node's device, and the source of that price.

Owns which price counts: the node's own, the catalogue's, or electricity. Does not own
the catalogue (`catalogue.py`) nor the cost of a plan (`costs/plan_costs.py`).
"""

from dataclasses import dataclass
from typing import Literal

from hetjax.cluster.catalogue import DeviceSpec, canonical_name, catalogue
from hetjax.cluster.cluster import Node

Basis = Literal["own", "spot", "on demand", "electricity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """USD per hour of one device; `source` names its source and date."""

    usd_per_hour: float
    basis: Basis
    source: str


def device_price(node: Node, usd_per_kwh: float | None = None) -> Price | None:
    """Return the price of one device of the node, or None if it has none.

    The node's own price, which is for the whole node, comes first. The catalogue's is
    next: for a spot node the spot price, if there is one. A node without any price, or
    whose own price is 0, costs the electricity of its devices, if `usd_per_kwh` is
    given and the catalogue has their watts.

    >>> device_price(Node(name="n", device="L40", count=1), 0.2)
    ... # doctest: +NORMALIZE_WHITESPACE
    Price(usd_per_hour=0.06, basis='electricity',
          source='300 W at 0.2 USD per kWh')
    """
    listed = _rented(node, _listed(node))
    if listed is not None and not _is_free(node):
        return listed
    watts = device_watts(node)
    if usd_per_kwh is None or watts is None:
        return listed
    return Price(
        usd_per_hour=watts / 1000 * usd_per_kwh,
        basis="electricity",
        source=f"{watts:g} W at {usd_per_kwh:g} USD per kWh",
    )


def device_price_per_hour(node: Node, usd_per_kwh: float | None = None) -> float | None:
    """Return the USD per hour of `device_price`."""
    price = device_price(node, usd_per_kwh)
    return None if price is None else price.usd_per_hour


def device_watts(node: Node) -> float | None:
    """Return the board power of one device of the node, or None if unknown."""
    spec = _listed(node)
    return None if spec is None else spec.watts


def pays_electricity(node: Node) -> bool:
    """Return whether nobody is paid for the node: it has no price, or one of 0."""
    return _is_free(node) or _rented(node, _listed(node)) is None


def is_priced_on_demand(node: Node) -> bool:
    """Return whether a spot node counts with the on-demand price, for lack of
    another."""
    price = device_price(node)
    return node.spot and price is not None and price.basis == "on demand"


def _rented(node: Node, spec: DeviceSpec | None) -> Price | None:
    """Return the price for renting the device, or None."""
    if node.price_per_hour is not None:
        usd_per_hour = node.price_per_hour / node.count
        return Price(
            usd_per_hour=usd_per_hour, basis="own", source="the cluster's own price"
        )
    if spec is None:
        return None
    if node.spot and spec.spot_price_per_hour is not None:
        return Price(
            usd_per_hour=spec.spot_price_per_hour,
            basis="spot",
            source=spec.sources["spot_price_per_hour"],
        )
    if spec.price_per_hour is None:
        return None
    return Price(
        usd_per_hour=spec.price_per_hour,
        basis="on demand",
        source=spec.sources["price_per_hour"],
    )


def _is_free(node: Node) -> bool:
    return node.price_per_hour == 0


def _listed(node: Node) -> DeviceSpec | None:
    return catalogue().get(canonical_name(node.device))
