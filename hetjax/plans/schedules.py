# SPDX-License-Identifier: Apache-2.0
"""Defines the schedules that a plan may name, and what the name alone determines.

Owns the table of schedules: a schedule that uses an existing order needs only a row
here. Does not own the orders themselves (`schedule/programs/generate.py`) nor
launch-aheads that suit unlike stages (`schedule/launch_ahead.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Order = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
# (number of stages, stage, number of microbatches) -> launch-ahead
LaunchAhead = Callable[[int, int, int], int]


def to_the_end(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Return 1F1B's launch-ahead: the distance to the end of the pipeline."""
    return min(num_stages - stage, num_microbatches)


def all_at_once(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Return GPipe's launch-ahead: all microbatches."""
    return num_microbatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule: its one-line summary, order and default launch-ahead.

    `order` is the rule that generates the order of actions. `launch_ahead` is the
    default for plans that give no launch-ahead.
    """

    summary: str
    order: Order = "1f1b"
    launch_ahead: LaunchAhead = to_the_end

    @property
    def shares(self) -> bool:
        """Whether several stages of a replica may run on the same devices.

        The planner has no lower bound for the given cuts of such a plan, only the bound
        of all plans.
        """
        return self.order in ("interleaved", "zero-bubble")

    @property
    def splits(self) -> bool:
        """Whether backward passes are split into I and W."""
        return self.order == "zero-bubble"


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(
        summary="all forward passes, then all backward passes",
        order="gpipe",
        launch_ahead=all_at_once,
    ),
    "1f1b": Schedule(
        summary="forward and backward passes in turn, once the pipeline is full"
    ),
    "h1f1b": Schedule(
        summary="1f1b with launch-aheads that hide slow links: written in the plan, or "
        "fitted"
    ),
    "interleaved": Schedule(
        summary="several stages of a replica on the same devices: smaller bubbles, "
        "more messages",
        order="interleaved",
    ),
    "zero-bubble": Schedule(
        summary="backward passes in two halves: weight gradients fill the bubbles, and "
        "activations are kept longer",
        order="zero-bubble",
    ),
}
# Further values of --schedule: each becomes one of the above, chosen by costs
FITTED = {
    "harp": "h1f1b with launch-aheads by HARP's thresholds",
    "searched": "the fastest schedule found",
}


def default_launch_ahead(
    schedule: str, *, num_stages: int, stage: int, num_microbatches: int
) -> int:
    """Return how many microbatches a stage may have between F and the end of B.

    Used for plans that give no launch-ahead. An unknown schedule gets 1F1B's. The value
    has no effect on a last stage that fuses F and B.
    """
    known = SCHEDULES.get(schedule, SCHEDULES["1f1b"])
    return known.launch_ahead(num_stages, stage, num_microbatches)
