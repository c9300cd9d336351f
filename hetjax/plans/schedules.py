# SPDX-License-Identifier: Apache-2.0
"""The schedules that a plan may name, and what follows from the name alone.

Owns the table of schedules: a row here is all that a schedule needs whose order there
is already. Does not own the orders themselves (`schedule/programs/generate.py`) nor
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
    """What a schedule does, in a line for people, and what others ask of it.

    `order` is the rule that generates the order of actions, `launch_ahead` what a plan
    means that says none.
    """

    summary: str
    order: Order = "1f1b"
    launch_ahead: LaunchAhead = to_the_end

    @property
    def shares(self) -> bool:
        """Whether several stages of a replica may run on the same devices.

        A plan of such a schedule has no bound for its own cuts; the planner has one for
        all plans.
        """
        return self.order in ("interleaved", "zero-bubble")

    @property
    def splits(self) -> bool:
        """Whether backwards are split in I and W."""
        return self.order == "zero-bubble"


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(
        summary="all forward passes, then all backward passes",
        order="gpipe",
        launch_ahead=all_at_once,
    ),
    "1f1b": Schedule(
        summary="forward and backward in turn, as soon as the pipeline is full"
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
# What a plan may be asked to become besides: one of the above, by its costs
FITTED = {
    "harp": "h1f1b with launch-aheads by HARP's thresholds",
    "searched": "the fastest that is found",
}


def default_launch_ahead(
    schedule: str, *, num_stages: int, stage: int, num_microbatches: int
) -> int:
    """Return how many microbatches a stage may have between F and the end of B.

    For plans that say nothing; 1F1B's for a schedule that nobody knows. It means
    nothing on a last stage that fuses F and B.
    """
    known = SCHEDULES.get(schedule, SCHEDULES["1f1b"])
    return known.launch_ahead(num_stages, stage, num_microbatches)
