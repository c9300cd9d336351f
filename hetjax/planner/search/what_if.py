# SPDX-License-Identifier: Apache-2.0
"""Finds the best plans on clusters that have one node more or fewer of some class.

Owns these clusters and the searches on them, which know the best plan on the present
cluster and improve on it if they can. So one more node never makes the step slower. A
plan for fewer nodes that is faster than the best plan becomes the best plan. Does not
own the search itself (`find.py`) nor the display of results (`report/`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from hetjax.cluster.cluster import Cluster, part_of, with_copies
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import (
    TimeUp,
    check_deadline,
    deadline,
    is_over,
    left_s,
)
from hetjax.planner.model.objectives import Objective, score
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Search
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

_LOCAL_WORK = 7_500  # work of local search, for each cluster


def other_clusters(request: PlanRequest) -> Iterator[tuple[str, Cluster]]:
    """Yield the clusters with one more and one less node of each class, by name."""
    for nodes in request.classes:
        yield (
            f"one more {nodes.name} node",
            with_copies(request.cluster, nodes.nodes[-1], 1),
        )
    for nodes in request.classes:
        gone = nodes.nodes[-1].name
        left = [n.name for n in request.cluster.nodes if n.name != gone]
        if left:
            yield f"one {nodes.name} node fewer", part_of(request.cluster, left)


def best_on_others(
    search: Search, objective: Objective, clusters: Mapping[str, Cluster]
) -> dict[str, Predicted | None]:
    """Return the best plan on each cluster; None where none fits.

    Clusters whose search did not end in time (`model/deadline.py`) are left out. The
    search, which is over, considers the plans that fit its own cluster. Its best plan
    then counts for every cluster that has all of that plan's nodes.
    """
    found: dict[str, Predicted | None] = {}
    plans: dict[str, Plan] = {}
    for n, (name, cluster) in enumerate(clusters.items()):
        try:
            with deadline(left_s() / (len(clusters) - n)):
                check_deadline()
                best = _best_on(search, objective, name, cluster)
                if not is_over():
                    found[name] = best
        except TimeUp:
            break
        if best is not None and best.plan.nodes <= search.request.cluster.names:
            plans[name] = best.plan
    search.improve_on(plans)
    ours = search.found_by(objective).best
    for name, best in found.items():
        by = partial(score, cluster=clusters[name], objective=objective)
        fits = ours.plan.nodes <= clusters[name].names
        if fits and (best is None or by(ours) < by(best)):
            found[name] = ours
    return found


def _best_on(
    search: Search, objective: Objective, name: str, cluster: Cluster
) -> Predicted | None:
    def report_line(line: str) -> None:
        search.progress(f"{name}: {line}")

    request = replace(search.request, cluster=cluster)
    other = Search(request, [objective], report_line, _LOCAL_WORK)
    try:
        other.run(proves=False)
        known = search.found_by(objective).best.plan
        if known.nodes <= cluster.names:
            other.improve_on({"as it is": known})
    except NoFeasiblePlan:
        return None
    return other.found_by(objective).best
