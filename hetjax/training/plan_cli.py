# SPDX-License-Identifier: Apache-2.0
"""The command `plan`: a model and a cluster in, the best plan out.

Owns the order of things, progress on the screen, and the files that are written. Does
not own options (`plan_options.py`, `plan_request.py`), the searches (`planning.py`) nor
what is shown (`plan_tables.py`, `plan_html.py`).
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from hetjax.planner.picture import write_layout
from hetjax.plans.files import write_plan
from hetjax.schedule.plot import check_picture, matplotlib_module
from hetjax.training.costing import check_times
from hetjax.training.outputs import check_folders, writing
from hetjax.training.plan_html import write_report
from hetjax.training.plan_options import PROGRAM, PlanOptions, parse
from hetjax.training.plan_request import objective_of, questions_of, request_of
from hetjax.training.plan_rows import step_line
from hetjax.training.plan_tables import plan_of, plan_values, tables
from hetjax.training.planning import Planned, planned
from hetjax.training.prediction import check_finite


def plan_command(arguments: Sequence[str]) -> None:
    """Plan as the arguments say; print and write what they ask for.

    BadInput before anything is written, NoFeasiblePlan where nothing fits.
    """
    options, preset = parse(arguments)
    _check_outputs(options)
    questions = questions_of(options)
    request = request_of(options, preset, questions.current)
    objective = objective_of(options, request.cluster)
    with _progress(options.json) as progress:
        found = planned(
            request,
            objective,
            questions,
            profile_path=options.profile,
            progress=progress,
        )
    check_times(found.best.costs)
    check_finite(found.best)
    print(_json(found) if options.json else tables(found))
    with writing("--output", "--plot", "--report"):
        for line in _write(options, found, f"{PROGRAM} {shlex.join(arguments)}"):
            if not options.json:
                print(line)
    if found.found is not None and found.found.bound.is_false:
        raise SystemExit(found.found.bound.why)


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
        write_layout(options.plot, plan, found.request.cluster, title)
        yield f"picture: {options.plot}"
    if options.report is not None:
        write_report(options.report, found, command)
        yield f"report: {options.report}"


def _json(found: Planned) -> str:
    return json.dumps(plan_values(found), allow_nan=False)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error: a moving line, or plain lines."""
    console = Console(stderr=True)
    if quiet:
        yield lambda line: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with console.status("planning") as status:
            yield lambda line: status.update(escape(line))
    else:
        yield lambda line: print(line, file=sys.stderr, flush=True)
