# SPDX-License-Identifier: Apache-2.0
"""Defines the record of a run's measured steps and work, and the file that stores it.

Owns the JSON and the beliefs that follow from it. Does not own the arithmetic
(`beliefs.py`), the records kept beyond a run (`kept.py`) nor the measuring
(`training/observers/step_comparison.py`).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.beliefs import (
    MEASURED,
    Beliefs,
    Observation,
    prior_beliefs,
)
from hetjax.costs.certainty.elasticities import (
    LINK,
    SOFTWARE,
    Elasticities,
    parameters_of,
)
from hetjax.costs.certainty.priors import (
    EARLIER_RUNS,
    NOBODY,
    NOISE,
    NOISE_OF_OTHER_PLANS,
    NOISES,
    RUN,
    Lesson,
    is_parameter,
    source,
)
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed, read_file
from hetjax.files.tables import read_record
from hetjax.files.writing import write_whole

VERSION = 1
_MOST = 128  # observations that are kept: the last ones
_FIX = "remove the file: the run writes a new one"
_MOST_SHARE = 2.0


@dataclass(frozen=True, slots=True)
class StepCalibration:
    """Measured steps and the work in them, with predictions at speeds as modelled.

    Some observations are sums that were measured alone, without our software. `source`
    names the file of all observations for people. `lesson` tells whether they are from
    this run or from earlier runs.
    """

    observations: tuple[Observation, ...] = ()
    source: str = ""
    lesson: Lesson = RUN

    def with_step(
        self, step: Observation, work: Iterable[Observation] = ()
    ) -> "StepCalibration":
        """Return these steps and one more with its `work`, as steps of this run."""
        return StepCalibration((*self.observations, *work, step)[-_MOST:])

    def beliefs(
        self, cluster: Cluster, noise: float = NOISE, plan: str = ""
    ) -> Beliefs:
        """Return the beliefs about a cluster's speeds after these steps.

        Their noise is that of a step of the plan with the digest `plan`. `noise`
        applies to runs on kinds of device that no step has used. Steps of earlier runs
        may contradict each other, because their devices were not equally fast. Then all
        noise is multiplied by the misfit of these steps to the beliefs learnt from them
        together.
        """
        seen = self.observations
        others = {p for o in seen for p in o.elasticities}
        prior = prior_beliefs(cluster, noise, others=sorted(others))
        kinds = {owner for owner, name in parameters_of(cluster) if name == "products"}
        if kinds <= self.kinds():
            if plan and any(o.plan == plan for o in seen):
                noise = min(noise, NOISES[self.lesson])
            elif all(source(kind) != NOBODY for kind in kinds):
                noise = min(noise, NOISE_OF_OTHER_PLANS)
        found = prior.observed(seen)
        if self.lesson == EARLIER_RUNS and self.num_steps > 1:
            times = max(found.misfit(seen), 1.0)
            found = prior.observed(replace(o, noise=times * o.noise) for o in seen)
            noise *= times
        return found.with_noise(noise)

    def applied(self, cluster: Cluster) -> Cluster:
        """Return the cluster at the mean speeds after these steps."""
        return self.beliefs(cluster).applied(cluster) if self.observations else cluster

    @property
    def last_step(self) -> tuple[Observation, ...]:
        """The last step, after the work in it."""
        ends = [i for i, o in enumerate(self.observations) if o.what == "step"]
        first = ends[-2] + 1 if len(ends) > 1 else 0
        return tuple(o for o in self.observations[first:] if o.what != "sum")

    def without_last_step(self) -> "StepCalibration":
        """Return all other steps; sums that were measured alone stay."""
        last = self.last_step
        left = tuple(o for o in self.observations if all(o is not x for x in last))
        return replace(self, observations=left)

    def only_sums(self) -> "StepCalibration":
        """Return the sums that were measured alone."""
        sums = tuple(o for o in self.observations if o.what == "sum")
        return replace(self, observations=sums)

    def ends_with(self, plan: str) -> bool:
        """Return whether the last step was one of the plan with this digest."""
        return bool(self.last_step) and self.last_step[-1].plan == plan

    @property
    def num_steps(self) -> int:
        return sum(o.what == "step" for o in self.observations)

    def kinds(self) -> frozenset[str]:
        """Return the kinds of device that some step has used."""
        return self._kinds("step")

    def kinds_of_sums(self) -> frozenset[str]:
        """Return the kinds of device on which sums were measured alone."""
        return self._kinds("sum")

    def _kinds(self, what: str) -> frozenset[str]:
        used = (p for o in self.observations if o.what == what for p in o.elasticities)
        return frozenset(owner for owner, name in used if owner and name != LINK)


UNCALIBRATED = StepCalibration()


def read_calibration(path: str | Path) -> StepCalibration:
    """Read a run's measured steps; a BadInput error starts with the path."""
    found = read_file(path, parse_calibration, what="calibration file")
    return replace(found, source=str(path))


def parse_calibration(text: str) -> StepCalibration:
    """Read the JSON text; BadInput says where the error is."""
    rows = step_rows(text, version=VERSION, most=_MOST, fix=_FIX)
    return StepCalibration(
        tuple(parse_step(raw, f"steps[{i}]") for i, raw in enumerate(rows))
    )


def step_rows(text: str, *, version: int, most: int, fix: str) -> list[Any]:
    """Return the unparsed steps of a JSON file of that version.

    BadInput says where the error is; `fix` is its advice.
    """
    allowed = "JSON: one object with version and steps"
    raw = parsed(text, json_value, what="JSON", allowed=allowed, fix=fix)
    values = read_record(
        raw, where="", required={"version": "an integer", "steps": "a list"}
    )
    if values["version"] != version or len(values["steps"]) > most:
        raise BadInput(
            got=f"version {values['version']} with {len(values['steps'])} steps",
            allowed=f"version {version} with at most {most} steps",
            fix=fix,
        )
    return values["steps"]


def write_calibration(path: str | Path, calibration: StepCalibration) -> None:
    """Write a file that `read_calibration` reads back as the same steps."""
    write_whole(path, calibration_json(calibration))


def calibration_json(calibration: StepCalibration) -> str:
    """Return the JSON text that `parse_calibration` reads back as the same steps."""
    steps = [step_values(step) for step in calibration.observations]
    return json.dumps({"version": VERSION, "steps": steps}, indent=1) + "\n"


def step_values(step: Observation) -> dict[str, Any]:
    """Return the JSON values of a step."""
    return {
        "what": step.what,
        "plan": step.plan,
        "measured_s": step.measured_s,
        "predicted_s": step.predicted_s,
        "noise": step.noise,
        "shares": [
            {"what": owner, "speed": name, "share": share}
            for (owner, name), share in step.elasticities.items()
        ],
    }


def parse_step(raw: object, where: str) -> Observation:
    """Read a step of a JSON file; BadInput says where the error is."""
    values = read_record(
        raw,
        where=where,
        required={
            "measured_s": "a number",
            "predicted_s": "a number",
            "noise": "a number",
            "shares": "a list",
        },
        optional={"what": "a string", "plan": "a string"},
    )
    for key in ("measured_s", "predicted_s", "noise"):
        _check(
            1e-9 < values[key] < 1e9, f"{where}.{key} = {values[key]}", "1e-9 to 1e9"
        )
    shares = _shares(values.pop("shares"), where)
    # files from before work was measured do not say what
    what = values.setdefault("what", "step" if SOFTWARE in shares else "sum")
    _check(what in MEASURED, f"{where}.what = {what!r}", " or ".join(MEASURED))
    return Observation(elasticities=shares, **values)


def _shares(rows: Iterable[object], where: str) -> Elasticities:
    found: dict[tuple[str, str], float] = {}
    for raw in rows:
        row = read_record(
            raw,
            where=f"{where}.shares",
            required={"what": "a string", "speed": "a string", "share": "a number"},
        )
        parameter, share = (row["what"], row["speed"]), row["share"]
        _check(
            is_parameter(parameter),
            f"{where}.shares: {parameter}",
            "a speed of the time model",
        )
        in_range = abs(share) <= _MOST_SHARE
        _check(in_range, f"{where}.shares: {share}", f"up to {_MOST_SHARE}")
        found[parameter] = share
    return found


def _check(holds: bool, got: str, allowed: str) -> None:
    if not holds:
        raise BadInput(got=got, allowed=allowed, fix=_FIX)
