# SPDX-License-Identifier: Apache-2.0
"""The schedules that a plan may name, and what follows from the name alone.

Owns the list of schedules, their traits and default launch-aheads. Does not own the
order of their actions (`hetjax/schedule/`) nor launch-aheads fitted to unlike stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """`shares`: several stages of a replica may run on the same devices; plans of such
    a schedule have no lower bound, all others do. `splits`: backwards are split in I
    and W."""

    shares: bool = False
    splits: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "h1f1b": Schedule(),  # 1f1b with launch-aheads that suit unlike stages
    "interleaved": Schedule(shares=True),
    "zero-bubble": Schedule(shares=True, splits=True),
}


def default_launch_ahead(
    schedule: str, *, num_stages: int, stage: int, num_microbatches: int
) -> int:
    """Return how many microbatches a stage may have between F and the end of B.

    For plans that say nothing: all of them under GPipe, else the distance to the end.
    It means nothing on a last stage that fuses F and B.
    """
    if schedule == "gpipe":
        return num_microbatches
    return min(num_stages - stage, num_microbatches)
