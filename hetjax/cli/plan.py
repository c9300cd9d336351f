# SPDX-License-Identifier: Apache-2.0
"""The command `plan`: a model and a cluster in, the best plan out.

Owns the order of things, progress on the screen, and the files that are written. Does
not own options (`plan_options.py`, `plan_request.py`), the searches
(`planner/comparison.py`) nor what is shown (`report/`).
"""

import json
import math
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from hetjax.cli.outputs import check_folders, writing
from hetjax.cli.plan_options import PROGRAM, PlanOptions, parse
from hetjax.cli.plan_request import objective_of, questions_of, request_of
from hetjax.errors import BadInput
from hetjax.planner.comparison import Planned, Questions, planned
from hetjax.planner.costing import check_times
from hetjax.planner.find import POLISH_S
from hetjax.planner.limits import Limit, TimeUp, limited
from hetjax.planner.objectives import Objective
from hetjax.planner.request import Request
from hetjax.plans.files import write_plan
from hetjax.report.layout import layout_picture
from hetjax.report.picture import check_picture, matplotlib_module
from hetjax.report.plan_html import write_report
from hetjax.report.plan_rows import step_line
from hetjax.report.plan_tables import plan_of, plan_values, tables
from hetjax.report.prediction import check_finite
from hetjax.report.progress import working

Ended = Literal["interrupted", "search_s"]
_ENDED: dict[Ended, str] = {
    "interrupted": "ended by Ctrl-C",
    "search_s": "ended after --search-s",
}


def plan_command(arguments: Sequence[str]) -> None:
    """Plan as the arguments say; print and write what they ask for.

    BadInput before anything is written, NoFeasiblePlan where nothing fits.
    """
    options, preset = parse(arguments)
    _check_outputs(options)
    questions = questions_of(options)
    request = request_of(options, preset, questions.current)
    objective = objective_of(options, request.cluster)
    found, ended = _searched(options, request, objective, questions)
    check_times(found.best.costs)
    check_finite(found.best)
    print(_json(found, ended) if options.json else tables(found))
    if ended is not None and not options.json:
        print(f"{_ENDED[ended]}: the best plan so far")
    with writing("--output", "--plot", "--report"):
        for line in _write(options, found, f"{PROGRAM} {shlex.join(arguments)}"):
            if not options.json:
                print(line)
    if found.found.bound.is_false:
        raise SystemExit(found.found.bound.why)


def _searched(
    options: PlanOptions, request: Request, objective: Objective, questions: Questions
) -> tuple[Planned, Ended | None]:
    """Search until there is nothing more to try, or the end; say what ended it.

    BadInput if no plan was found in --search-s, KeyboardInterrupt if by Ctrl-C.
    """
    search_s = math.inf if options.search_s is None else options.search_s
    with limited(search_s) as limit, _stopped_by_ctrl_c(limit):
        try:
            with working("planning", quiet=options.json) as progress:
                found = planned(
                    request,
                    objective,
                    questions,
                    profile_path=options.profile,
                    progress=progress,
                    polish_s=POLISH_S if options.search_s is None else search_s,
                )
        except TimeUp:
            if limit.is_stopped:
                raise KeyboardInterrupt from None
            raise BadInput(
                got=f"--search-s {search_s:g}, in which no plan was found",
                allowed="more time, until a first plan is found",
                fix=f"give --search-s {4 * search_s:g}, or leave it out",
            ) from None
        if limit.is_stopped:
            return found, "interrupted"
        return found, "search_s" if limit.left_s == 0 else None


@contextmanager
def _stopped_by_ctrl_c(limit: Limit) -> Iterator[None]:
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


def _check_outputs(options: PlanOptions) -> None:
    """Refuse what could not be written before anything is computed."""
    check_folders(
        {
            "--output": options.output,
            "--plot": options.plot,
            "--report": options.report,
        }
    )
    if options.plot is not None:
        check_picture(options.plot)
    if options.report is not None:
        matplotlib_module()


def _write(options: PlanOptions, found: Planned, command: str) -> Iterator[str]:
    """Write the files that were asked for; yield a line on each."""
    plan = plan_of(found)
    if options.output is not None:
        write_plan(options.output, plan)
        yield f"plan: {options.output}"
    if options.plot is not None:
        title = f"{plan.model}, {plan.schedule}: {step_line(found.best)}"
        layout_picture(plan, found.request.cluster, title).save(options.plot)
        yield f"picture: {options.plot}"
    if options.report is not None:
        write_report(options.report, found, command)
        yield f"report: {options.report}"


def _json(found: Planned, ended: Ended | None) -> str:
    return json.dumps(plan_values(found) | {"ended": ended}, allow_nan=False)
