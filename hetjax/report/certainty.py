# SPDX-License-Identifier: Apache-2.0
"""How sure a prediction is, in words and as values.

Owns the line "how sure" and the keys of JSON. Does not own the interval
(`schedule/certainty.py`).
"""

from collections.abc import Mapping
from typing import Any

from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.report.metrics import ms
from hetjax.schedule.certainty import Certainty

SAME = "not distinguishable"  # of two plans whose ratio may as well be 1


def how_sure_line(certainty: Certainty) -> str:
    """Return the interval of a step time, and what it rests on, in one line."""
    interval = certainty.interval
    return (
        f"how sure: {interval.level:.0%} of such steps take {ms(interval.low)} to "
        f"{ms(interval.high)} ms; {_basis(certainty.basis)}"
    )


def certainty_values(
    certainty: Certainty | None, tokens_per_step: int
) -> dict[str, Any]:
    """Return the interval under the names that `--json` gives it; None: unknown."""
    if certainty is None:
        return {"interval": None}
    interval = certainty.interval
    return {
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
        }
    }


def distinguishable(ratio: CredibleInterval) -> bool:
    """Say whether one plan is surely faster than another, whose ratio this is."""
    return 1.0 not in ratio


def _basis(basis: Mapping[str, str]) -> str:
    """What each kind rests on, kinds with the same basis together."""
    kinds: dict[str, list[str]] = {}
    for kind, told in basis.items():
        kinds.setdefault(told, []).append(kind)
    return "; ".join(f"{', '.join(names)}: {told}" for told, names in kinds.items())
