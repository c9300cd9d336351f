# SPDX-License-Identifier: Apache-2.0
"""Says how sure a prediction is, in words and as values.

Owns the lines "how sure", of a step, of memory and of a profile, and "calibration",
and the keys of JSON. Does not own the intervals (`schedule/certainty.py`,
`costs/certainty/memory.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.costs.certainty.calibration import StepCalibration
from hetjax.costs.certainty.memory import LEVEL, NUM_STAGES
from hetjax.costs.certainty.priors import RUN
from hetjax.report.metrics import ms
from hetjax.schedule.certainty import Certainty
from hetjax.schedule.predicted import Predicted

SAME = "not distinguishable"  # of two plans whose ratio may be 1


def how_sure_lines(certainty: Certainty) -> Iterator[str]:
    """Yield a line on the interval of a step time and what the interval rests on.

    If speeds were calibrated, another line tells from what.
    """
    interval = certainty.interval
    yield (
        f"how sure: {interval.level:.0%} of such steps take {ms(interval.low)} to "
        f"{ms(interval.high)} ms; {_basis(certainty.basis)}"
    )
    if certainty.calibration.observations:
        yield calibration_line(certainty.calibration)


def memory_lines(predicted: Predicted) -> Iterator[str]:
    """Yield a line on the memory of the fullest device, by its interval's upper end.

    Yields nothing if no kind of device is known.
    """
    certainties, has_bytes = predicted.memory_certainty, predicted.capacity_bytes
    if not certainties:
        return
    device = max(certainties, key=lambda d: certainties[d].high_bytes / has_bytes[d])
    sure = certainties[device]
    if sure.backend is None:
        yield f"how sure is memory: the compiler reported the workspace of {device}"
        return
    unit, size = ("GiB", 2**30) if sure.high_bytes > 0.1 * 2**30 else ("MiB", 2**20)
    low, high = sure.low_bytes / size, sure.high_bytes / size
    fits = ""
    if sure.fits is not None:
        fits = f" and fits with a probability of {_percent(sure.fits)}"
    yield (
        f"how sure is memory: {device} uses {low:.4g} to {high:.4g} {unit} "
        f"({LEVEL:.0%}){fits}; {NUM_STAGES[sure.backend]} stages compiled for "
        f"{sure.backend.upper()}s"
    )


def _percent(probability: float) -> str:
    """Return a probability in whole per cent, never rounded to certainty."""
    return f"{min(max(probability, 0.01), 0.99):.0%}"


def narrowing_line(
    kind: str, by_profile: CredibleInterval, without: CredibleInterval
) -> str:
    """Return how much surer a profile makes predicted steps on a kind of device."""
    return (
        f"how sure: {by_profile.level:.0%} of steps on one {kind} within a factor of "
        f"{by_profile.factor:.2f} of their prediction with this profile, "
        f"{without.factor:.2f} without"
    )


def calibration_line(calibration: StepCalibration) -> str:
    """Return the number and kinds of steps that calibrated the speeds, and the file."""
    steps, parts = calibration.num_steps, list[str]()
    if steps:
        kinds = ", ".join(sorted(calibration.kinds()))
        parts.append(f"{steps} {'step' if steps == 1 else 'steps'} on {kinds}")
    if between := calibration.kinds_of_sums():
        parts.append(f"sums between {', '.join(sorted(between))}")
    line = f"calibration: {', '.join([*parts, calibration.source])}"
    return (
        line if calibration.lesson == RUN else f"{line}; --calibration none ignores it"
    )


def certainty_values(
    certainty: Certainty | None, tokens_per_step: int
) -> dict[str, Any]:
    """Return the interval under the names that `--json` gives it; None if unknown."""
    if certainty is None:
        return {"interval": None, "calibration": None}
    interval = certainty.interval
    return {
        "calibration": _calibration_values(certainty.calibration),
        "interval": {
            "level": interval.level,
            "step_time_s": [interval.low, interval.high],
            "tokens_per_s": [
                tokens_per_step / interval.high,
                tokens_per_step / interval.low,
            ],
            "rests_on": dict(certainty.basis),
            "decided_by": [
                {"what": owner, "speed": name, "share": share}
                for (owner, name), share in certainty.slopes.items()
            ],
        },
    }


def _calibration_values(calibration: StepCalibration) -> dict[str, Any] | None:
    if not calibration.observations:
        return None
    return {
        "source": calibration.source,
        "steps": calibration.num_steps,
        "kinds": sorted(calibration.kinds()),
        "sums_between": sorted(calibration.kinds_of_sums()),
        "lesson": calibration.lesson,
    }


def distinguishable(ratio: CredibleInterval) -> bool:
    """Return whether one of two plans with this ratio is surely faster."""
    return 1.0 not in ratio


def _basis(basis: Mapping[str, str]) -> str:
    """Return what each kind rests on; kinds with the same basis stand together."""
    kinds: dict[str, list[str]] = {}
    for kind, source in basis.items():
        kinds.setdefault(source, []).append(kind)
    return "; ".join(f"{', '.join(names)}: {source}" for source, names in kinds.items())
