# SPDX-License-Identifier: Apache-2.0
"""Builds the report of a run, current or long ended, from its directory.

Owns which files are read, and that a run does not fail if its report does. Does not own
the report (`hetjax/report/run_report.py`) nor the files (`rundir.py`).
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.costs.plan_costs import usd_per_hour
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.files.parsing import json_value, parsed
from hetjax.files.reading import read_text
from hetjax.models.named import allowed_name
from hetjax.plans.plan import Plan
from hetjax.report.prediction import SimulatedStep
from hetjax.report.progress import Display
from hetjax.report.run_record import RunRecord
from hetjax.report.run_report import RunReport
from hetjax.schedule.simulation.trace import Span, traced_spans
from hetjax.training.directory import rundir
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import Previous
from hetjax.training.observers.step_comparison import Predict, predict_step
from hetjax.training.run_model import run_model
from hetjax.training.settings.values import flat_values


def report_of(run_dir: str | Path, *, allow_model_code: str | None = None) -> RunReport:
    """Return the report of the run in a directory, as it is now.

    If no step can be predicted, for example of a model that is not known by name, the
    report says why. A model that is a function is called only if it is the one that
    `allow_model_code` names. Raises BadInput if there is no run, or if one of its files
    is broken.

    `report.save("report.html")` writes the page that a notebook shows by itself;
    `report.values()` are the headline numbers.

    >>> report_of("runs/never")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: no run in 'runs/never'
    ...
    """
    path = Path(run_dir)
    found = _previous(path)
    name = allowed_name(found.config.model, allow_model_code)
    config = replace(found.config, model=name)

    def predict(plan: Plan, cluster: Cluster) -> SimulatedStep:
        return predict_step(config, run_model(config), plan, cluster)

    return _report(path, found, predict)


def write_report(run_dir: Path, predict: Predict, shown: Display) -> None:
    """Write the report when a run ends; if that fails, show why."""
    path = run_dir / rundir.REPORT
    try:
        _report(run_dir, _previous(run_dir), predict).save(path)
    except Exception as error:  # no error may fail a run that has ended as it should
        shown.note(f"no report was written: {error}")
    else:
        shown.note(f"report: {path}")


def _previous(path: Path) -> Previous:
    found = rundir.read_previous(path)
    if found is None:
        raise BadInput(
            got=f"no run in {str(path)!r}",
            allowed=f"the directory of a run, with its {rundir.CONFIG}",
            fix="give the --run-dir of a run",
        )
    return found


def _report(path: Path, found: Previous, predict: Predict) -> RunReport:
    plan, step, why, price = found.needed_plan(), None, "", None
    try:
        step = predict(plan, found.cluster)
    except (BadInput, NoFeasiblePlan) as bad:
        why = bad.got
    with suppress(BadInput):  # a device without figures
        price = usd_per_hour(plan, found.cluster)
    return RunReport(
        RunRecord(
            run_dir=path,
            settings=flat_values(found.config),
            cluster=found.cluster,
            plan=plan,
            metrics=read_journal(path / rundir.METRICS),
            events=read_journal(path / rundir.EVENTS),
            predicted=step and step.predicted,
            certainty=step and step.certainty,
            why_not_predicted=why,
            is_simulated=found.config.simulate,
            usd_per_hour=price,
            traced=_traced(path / rundir.TRACE),
        )
    )


def _traced(path: Path) -> list[Span]:
    """Return the measured spans of the traced steps; none if no step was traced."""
    if not path.exists():
        return []
    return parsed(
        read_text(path, what="trace of the run"),
        lambda text: traced_spans(json_value(text)),
        what=f"trace {path}",
        allowed="the file as hetjax wrote it",
        fix="remove the file, which nothing else needs",
    )
