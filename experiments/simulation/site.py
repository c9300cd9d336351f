# SPDX-License-Identifier: Apache-2.0
"""What all processes of a simulated run share, and who hears of what they do."""

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

Heard = Callable[["SimWorker", State, int], None]  # its state after so many steps


@dataclass(frozen=True)
class Site:
    """Hosts' disks, the network, a store if there is one, who is where.

    `listening` has by address who can be called there, `told` hears of every state,
    `leaving` of who is to leave, `dropped` of whose state goes, `giving_up` of the last
    step whose saves stay, `lost` whenever a worker is, `removed` of old saves.
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
