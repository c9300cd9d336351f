# SPDX-License-Identifier: Apache-2.0
"""Interleaved 1F1B: what a device computes ahead where stages go round the devices.

Owns Megatron-LM's rule (arXiv 2104.04473). Stage i is on lane i mod P, so that each of
P lanes has V chunks. Microbatches go through in rounds of P, first one round through
all chunks of a lane, then the next; and lane p computes 2 (P - p - 1) + (V - 1) P
forwards before its first backward, which are in flight with the one that follows.

In launch-aheads, whose default on the last chunk is P - p: rounds of G microbatches,
and (V - 1) G + 2 K - 1 in flight with K the last chunk's. That cannot block for any K
that does not rise: a round at a time, its earlier chunks whole and its last chunk one
by one, stays within. Other ways to share devices have no such rule. Does not own the
order itself (`list_schedule.py`).
"""

from dataclasses import dataclass

from hetjax.plans.plan import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Microbatches by the round, and by lane the forwards that may be in flight."""

    size: int
    most_in_flight: tuple[int, ...]


def lanes_of(replica: Replica) -> list[int]:
    """Number the devices of the stages: equal numbers share them."""
    places = [(stage.node, stage.devices) for stage in replica.stages]
    devices = list(dict.fromkeys(places))
    return [devices.index(place) for place in places]


def rounds_of(replica: Replica) -> Rounds | None:
    """Return the rounds of a replica, None if its stages do not go round and round."""
    lanes = lanes_of(replica)
    num_lanes, num_stages = max(lanes) + 1, len(lanes)
    chunks = num_stages // num_lanes
    if chunks == 1 or lanes != [*range(num_lanes)] * chunks:
        return None
    aheads = [stage.launch_ahead for stage in replica.stages]
    earlier, last = aheads[:-num_lanes], aheads[-num_lanes:]
    size = min(num_lanes, in_rounds(min(earlier)))
    return Rounds(
        size=size,
        most_in_flight=tuple((chunks - 1) * size + in_rounds(ahead) for ahead in last),
    )


def in_rounds(launch_ahead: int) -> int:
    """Return how many forwards of one stage of such a replica may be in flight."""
    return 2 * launch_ahead - 1
