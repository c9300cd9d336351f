# SPDX-License-Identifier: Apache-2.0
"""Defines how long a simulated worker takes for each request."""

from experiments.simulation.world import World
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import AnyRequest

_TAKES_S: dict[type[AnyRequest], tuple[float, float]] = {
    schema.Build: (0.3, 3.0),
    schema.Compile: (0.2, 5.0),
    schema.Train: (0.2, 1.0),
    schema.Evaluate: (0.1, 0.5),
    schema.FindSaves: (0.01, 0.2),
    schema.PlaceState: (0.01, 0.2),
}
_SOON_S = 0.001, 0.02


def takes_s(world: World, request: AnyRequest) -> float:
    """Return the time until it is done or waits for others; rarely it is far longer."""
    found_s = world.random.uniform(*_TAKES_S.get(type(request), _SOON_S))
    return found_s * 30 if world.one_in(300) else found_s
