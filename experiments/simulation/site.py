# SPDX-License-Identifier: Apache-2.0
"""Defines what all processes of a simulated run share, and the listeners of a run."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from experiments.simulation.network import Network
from experiments.simulation.object_store import Bucket
from experiments.simulation.peers import Peers
from experiments.simulation.threads import Threads
from experiments.simulation.truth import State
from experiments.simulation.world import World

if TYPE_CHECKING:
    from experiments.simulation.worker import SimWorker

Heard = Callable[["SimWorker", State, int], None]  # worker, its state, steps


@dataclass(frozen=True)
class Site:
    """The network, the store if there is one, and the address of each process.

    `listening` maps each address to the peers that answer there. The callbacks: `told`
    receives every state, `leaving` the workers that are to leave, `dropped` a worker
    that drops its state, `giving_up` the last step whose saves stay. `lost` is called
    whenever a worker is lost, `removed` when old saves were removed.
    """

    world: World
    network: Network
    threads: Threads
    bucket: Bucket | None
    layers: tuple[str, ...]
    first: Callable[[], State]
    told: Heard
    keep: int
    leaving: Callable[[Collection[str]], None] = lambda workers: None
    dropped: Callable[["SimWorker"], None] = lambda worker: None
    giving_up: Callable[[int], None] = lambda kept: None
    lost: Callable[[], None] = lambda: None
    removed: Callable[[], None] = lambda: None
    listening: dict[str, Peers] = field(default_factory=dict)
