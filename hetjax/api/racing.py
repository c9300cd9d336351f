# SPDX-License-Identifier: Apache-2.0
"""Races planners against each other: `race_planners`.

Owns the sources of model and cluster, the time limit, and the order of the result.
Does not own the list of planners (`planner/search/contest.py`) nor how the race is
shown (`report/race/race.py`, `report/race/race_view.py`).
"""

import math
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.model import Model
from hetjax.models.named import TypedName, load_named
from hetjax.planner.model.deadline import deadline
from hetjax.planner.model.request import PlanRequest, check_request
from hetjax.planner.search.contest import CONTESTANTS, contest
from hetjax.report.race.race import Race, RaceEntry
from hetjax.report.race.race_view import QUIET, RaceView
from hetjax.training.layout.hardware import cluster_of


def race_planners(
    *,
    model: Model | str,
    cluster: Cluster | str | Path,
    global_batch: int,
    seq_len: int,
    search_s: float | None = None,
    view: RaceView = QUIET,
) -> Race:
    """Give every planner the same request, and judge all plans by one simulator.

    `search_s` limits all planners together; without it each runs to its own end. They
    have the default choices of `find_plan`, and every device computes in its best
    precision. The `view` shows which planner is running.

    Raises BadInput for invalid arguments, NoFeasiblePlan if no planner finds a plan
    that fits.

    >>> from hetjax.cluster.cluster import Node
    >>> nodes = tuple(Node(name=d, device=d, count=1) for d in ("L4", "H20"))
    >>> pair = Cluster(name="pair", nodes=nodes)
    >>> race = race_planners(model="tiny", cluster=pair, global_batch=8, seq_len=64)
    >>> race.entry("hetjax").tokens_per_s >= race.entry("even split").tokens_per_s
    True
    """
    request = PlanRequest(
        model=model if isinstance(model, Model) else load_named(TypedName(model)),
        cluster=cluster_of(cluster),
        seq_len=seq_len,
        global_batch=global_batch,
    )
    check_request(request)
    view.line_up(tuple(CONTESTANTS))
    entries: list[RaceEntry] = []
    with deadline(math.inf if search_s is None else search_s):
        for name, judged in contest(request, view.begins):
            about = CONTESTANTS[name].about
            entries.append(RaceEntry(name=name, about=about, judged=judged))
            view.planned(entries[-1])
    best_first = sorted(entries, key=lambda entry: -entry.tokens_per_s)
    if not best_first[0].tokens_per_s:
        raise _why_no_plan(entries, search_s)
    return Race(cluster=request.cluster, entries=tuple(best_first))


def _why_no_plan(entries: list[RaceEntry], search_s: float | None) -> Exception:
    """Return hetjax's error, or one that says that the time was too short."""
    why = entries[-1].judged
    if search_s is None or isinstance(why, NoFeasiblePlan):
        assert isinstance(why, NoFeasiblePlan)
        return why
    return BadInput(
        got=f"--search-s {search_s:g}, in which no planner found a plan",
        allowed="enough time for a first plan",
        fix=f"give --search-s {4 * search_s:g}",
    )
