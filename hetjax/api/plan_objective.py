# SPDX-License-Identifier: Apache-2.0
"""Derives the objective and the limits of a search from its choices.

Owns the checks of objectives and limits, and the warnings about unknown prices. Does
not own prices (`cluster/prices.py`) nor the meaning of objectives
(`planner/model/objectives.py`).
"""

import math
import warnings
from typing import get_args

from hetjax.api.plan_config import PlanConfig
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.cluster.prices import (
    device_price_per_hour,
    device_watts,
    is_priced_on_demand,
    pays_electricity,
)
from hetjax.errors import BadInput, did_you_mean
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.training.settings.checks import option

_MOST_USD_PER_KWH = 10.0
_TELLS_PRICE = (
    "set a price in the cluster file: price_per_hour = ... (USD, of the whole node)"
)


def objective_of(config: PlanConfig, cluster: Cluster) -> Objective:
    """Return the objective with its limits.

    Raises BadInput for invalid choices, and for choices about money if no price is
    known.
    """
    if config.objective not in get_args(Wish):
        raise BadInput(
            got=f"--objective {config.objective}",
            allowed=f"one of {', '.join(get_args(Wish))}",
            fix=did_you_mean(config.objective, get_args(Wish)),
        )
    for name in (
        "max_usd_per_hour",
        "deadline_hours",
        "tokens",
        "horizon_s",
        "search_s",
    ):
        _check_positive(name, getattr(config, name))
    for name in ("recovery_s", "checkpoint_every_s", "node_back_s"):
        _check_positive(name, getattr(config, name), zero=True)
    _check_work(config)
    _check_usd_per_kwh(config.usd_per_kwh)
    least = None
    if config.deadline_hours is not None:
        if config.tokens is None:
            raise BadInput(
                got="--deadline-hours without --tokens",
                allowed="a deadline for a number of tokens",
                fix="add --tokens 300e9, say",
            )
        least = config.tokens / (config.deadline_hours * 3600)
    found = Objective(
        wish=config.objective,
        max_usd_per_hour=config.max_usd_per_hour,
        min_tokens_per_s=least,
        tokens=config.tokens,
        recovery_s=config.recovery_s,
        checkpoint_every_s=config.checkpoint_every_s,
        node_back_s=config.node_back_s,
    )
    _check_prices(found, cluster, config.usd_per_kwh)
    return found


def needs_prices(objective: Objective) -> bool:
    """Return whether plans without a price are useless."""
    return objective.wish == "cost" or objective.max_usd_per_hour is not None


def priced_part(cluster: Cluster, usd_per_kwh: float | None) -> Cluster:
    """Return the part of the cluster whose nodes have a price."""
    priced = {
        node.name
        for node in cluster.nodes
        if device_price_per_hour(node, usd_per_kwh) is not None
    }
    return cluster if len(priced) == len(cluster.nodes) else part_of(cluster, priced)


def _check_positive(name: str, value: float | None, *, zero: bool = False) -> None:
    least = 0.0 if zero else math.ulp(0.0)
    if value is not None and not least <= value < math.inf:
        raise BadInput(
            got=f"{option(name)} {value:g}",
            allowed=f"a number {'from' if zero else 'above'} 0",
            fix=f"correct {option(name)}",
        )


def _check_work(config: PlanConfig) -> None:
    """Raise BadInput unless `search_work` has ascending numbers of checks, and comes
    without `search_s`."""
    work = config.search_work
    if work is None:
        return
    typed = ",".join(map(str, work))
    if not work or work[0] < 1 or list(work) != sorted(work):
        raise BadInput(
            got=f"--search-work {typed}",
            allowed="numbers from 1, in ascending order",
            fix="give the numbers that a search with --search-s printed",
        )
    if config.search_s is not None:
        raise BadInput(
            got=f"--search-s {config.search_s:g} with --search-work {typed}",
            allowed="one of the two",
            fix="leave one of them out",
        )


def _check_usd_per_kwh(value: float | None) -> None:
    if value is not None and not 0 < value <= _MOST_USD_PER_KWH:
        raise BadInput(
            got=f"{option('usd_per_kwh')} {value:g}",
            allowed=f"USD per kilowatt-hour, above 0, at most {_MOST_USD_PER_KWH:g}",
            fix=f"give {option('usd_per_kwh')} 0.3, say",
        )


def _check_prices(
    objective: Objective, cluster: Cluster, usd_per_kwh: float | None
) -> None:
    """Raise BadInput if the objective needs prices and no node has one; warn of kinds
    without a price."""
    asked = None
    if usd_per_kwh is not None:
        asked = f"{option('usd_per_kwh')} {usd_per_kwh:g}"
        _warn_of_watts(asked, cluster)
    if objective.wish == "cost":
        asked = "--objective cost"
    if objective.max_usd_per_hour is not None:
        asked = f"--max-usd-per-hour {objective.max_usd_per_hour:g}"
    if asked is None:
        return
    prices = [device_price_per_hour(node, usd_per_kwh) for node in cluster.nodes]
    if needs_prices(objective) and not any(price is not None for price in prices):
        raise BadInput(
            got=f"{asked}, but no node of cluster {cluster.name!r} has a known price",
            allowed="nodes with a price in the catalogue or the cluster file",
            fix="add price_per_hour = ... (USD, of the whole node) to the nodes",
        )
    if needs_prices(objective):
        unknown = {
            node.device
            for node, price in zip(cluster.nodes, prices, strict=True)
            if price is None
        }
        _warn_of_prices(asked, cluster, sorted(unknown))


def _warn_of_prices(asked: str, cluster: Cluster, unknown: list[str]) -> None:
    """Warn of kinds without a price, and of spot nodes without a spot price."""
    on_demand = sorted({n.device for n in cluster.nodes if is_priced_on_demand(n)})
    if unknown:
        warnings.warn(
            f"{asked}: no price for {', '.join(unknown)}: planned without them; "
            f"{_TELLS_PRICE}",
            stacklevel=2,
        )
    if on_demand:
        warnings.warn(
            f"{asked}: no spot price for {', '.join(on_demand)}: the on-demand price "
            f"counts; {_TELLS_PRICE}",
            stacklevel=2,
        )


def _warn_of_watts(asked: str, cluster: Cluster) -> None:
    """Warn of kinds whose electricity should count but whose watts are unknown."""
    unknown = {
        node.device
        for node in cluster.nodes
        if pays_electricity(node) and device_watts(node) is None
    }
    if unknown:
        warnings.warn(
            f"{asked}: no watts for {', '.join(sorted(unknown))}: its electricity is "
            f"not counted; {_TELLS_PRICE}",
            stacklevel=2,
        )
