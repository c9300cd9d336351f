# SPDX-License-Identifier: Apache-2.0
"""Finding plans: `find_plan` and `compare_planners`.

Owns what a search is given, how it ends early, and that it shows how it goes. Does not
own what is planned (`plan_request.py`), the searches (`planner/search/comparison.py`)
nor what is shown (`report/found.py`).
"""

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from hetjax.api.plan_config import plan_config
from hetjax.api.plan_request import Subject, objective_of, questions_of, request_of
from hetjax.cluster.cluster import Cluster
from hetjax.errors import BadInput
from hetjax.models.model import Model
from hetjax.planner.model.costing import check_times
from hetjax.planner.model.deadline import Deadline, TimeUp, deadline
from hetjax.planner.search.comparison import planned
from hetjax.planner.search.find import LOCAL_SEARCH_S
from hetjax.plans.plan import Plan
from hetjax.report.found import ComparedPlanners, FoundPlan
from hetjax.report.prediction import check_finite
from hetjax.report.progress import working
from hetjax.training.presets import preset as preset_of


def find_plan(
    preset: str | None = None,
    *,
    model: Model | str | None = None,
    cluster: Cluster | str | Path | None = None,
    profile: str | Path | None = None,
    current: Plan | str | Path | None = None,
    quiet: bool = False,
    **choices: Any,
) -> FoundPlan:
    """Find the best plan for a cluster, and how much better any could be.

    What is not given is the preset's; without one, `model`, `global_batch` and
    `seq_len` have to be. `cluster` is a cluster, a file or a name; else the preset's,
    else the devices that are here. `profile` is a file of measured times, `current` the
    plan that runs now, from which a move has to pay. `choices` are the fields of
    `PlanConfig`: `objective="cost"`, `search_s=30`, `microbatch_sizes=(1, 2)` and so
    on. Ctrl-C ends the search with the best plan so far.

    BadInput for what cannot be, NoFeasiblePlan where nothing fits.

    >>> from hetjax.cluster.cluster import Node
    >>> nodes = tuple(Node(name=d, device=d, count=1) for d in ("L4", "H20"))
    >>> pair = Cluster(name="pair", nodes=nodes)
    >>> few = dict(global_batch=8, microbatch_sizes=(4,), remat=("none",))
    >>> found = find_plan("tiny", cluster=pair, quiet=True, **few)
    >>> found.plan.global_batch, 0 < found.lower_bound_s <= found.step_time_s
    (8, True)
    """
    choices = {"compare": ("none",)} | choices
    subject = Subject(model=model, cluster=cluster, profile=profile, current=current)
    return _found(preset, subject, choices, quiet)


def compare_planners(
    preset: str | None = None,
    *,
    model: Model | str | None = None,
    cluster: Cluster | str | Path | None = None,
    profile: str | Path | None = None,
    quiet: bool = False,
    **choices: Any,
) -> ComparedPlanners:
    """Plan as other planners would, too, and judge all plans by the same simulator.

    Arguments are those of `find_plan`; `compare` names the other planners, all of them
    unless it is given.

    >>> from hetjax.cluster.cluster import Node
    >>> nodes = tuple(Node(name=d, device=d, count=1) for d in ("L4", "H20"))
    >>> few = dict(global_batch=8, microbatch_sizes=(4,), compare=("megatron",))
    >>> cluster = Cluster(name="pair", nodes=nodes)
    >>> steps = compare_planners("tiny", cluster=cluster, quiet=True, **few).steps
    >>> steps["hetjax"].step_time_s <= steps["megatron"].step_time_s
    True
    """
    choices = {"compare": ()} | choices
    subject = Subject(model=model, cluster=cluster, profile=profile)
    return ComparedPlanners(_found(preset, subject, choices, quiet).planned)


def _found(
    name: str | None, subject: Subject, choices: dict[str, Any], quiet: bool
) -> FoundPlan:
    """Search until there is nothing more to try, or the end; say what ended it.

    BadInput if no plan was found in `search_s`, KeyboardInterrupt if by Ctrl-C.
    """
    preset = None if name is None else preset_of(name)
    config = replace(plan_config(preset), **choices)
    questions = questions_of(config, subject)
    request = request_of(config, subject, preset)
    objective = objective_of(config, request.cluster)
    search_s = math.inf if config.search_s is None else config.search_s
    with deadline(search_s) as limit, _stopped_by_ctrl_c(limit):
        try:
            with working("planning", quiet=quiet) as progress:
                found = planned(
                    request,
                    objective,
                    questions,
                    profile_path=subject.profile_path,
                    progress=progress,
                    local_search_s=LOCAL_SEARCH_S
                    if config.search_s is None
                    else search_s,
                )
        except TimeUp:
            if limit.is_stopped:
                raise KeyboardInterrupt from None
            raise BadInput(
                got=f"--search-s {search_s:g}, in which no plan was found",
                allowed="more time, until a first plan is found",
                fix=f"give --search-s {4 * search_s:g}, or leave it out",
            ) from None
        check_times(found.best.costs)
        check_finite(found.best)
        if limit.is_stopped:
            return FoundPlan(found, "interrupted")
        return FoundPlan(found, "search_s" if limit.left_s == 0 else None)


@contextmanager
def _stopped_by_ctrl_c(limit: Deadline) -> Iterator[None]:
    """Let the first SIGINT end the search; the second interrupts as usual."""

    def stop(number: int, frame: FrameType | None) -> None:
        limit.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # not print: it may be what the signal has interrupted
        os.write(2, b"\nending with the best plan so far; Ctrl-C again: at once\n")

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not its business
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
