# SPDX-License-Identifier: Apache-2.0
"""The launch-ahead that a schedule gives a stage when nothing better is known.

Owns the defaults of the schedules. Does not own the programs that use them
(`schedule/`) nor launch-aheads fitted to unlike stages (`planner/`).
"""


def default_launch_ahead(
    schedule: str, *, num_stages: int, stage: int, num_microbatches: int
) -> int:
    """Return the forwards in flight: all for GPipe, else 1F1B's distance to the end."""
    if schedule == "gpipe":
        return num_microbatches
    return min(num_stages - stage, num_microbatches)
