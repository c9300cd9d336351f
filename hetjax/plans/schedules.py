# SPDX-License-Identifier: Apache-2.0
"""The schedules that a plan may name, and what follows from the name alone.

Owns the list of schedules, their traits and default launch-aheads. Does not own the
order of their actions (`hetjax/schedule/`) nor launch-aheads fitted to unlike stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """`shares`: several stages of a replica may run on the same devices, which the
    bounds on step times leave out. `splits`: backwards are split in I and W."""

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
    """Return the forwards in flight: all for GPipe, else 1F1B's distance to the end."""
    if schedule == "gpipe":
        return num_microbatches
    return min(num_stages - stage, num_microbatches)
