# SPDX-License-Identifier: Apache-2.0
"""A worker and those of the other hosts of its node, which depend on each other.

Owns entering and leaving their world, and that the process ends where it can be of no
use any more: a host of the node is lost, or a program waits for one for ever. Does not
own the settings of a world (`hetjax/mesh/multihost.py`) nor who is told to enter which
(`runtime/control/`).
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from hetjax.comm.addresses import listen
from hetjax.errors import BadInput
from hetjax.mesh.multihost import World, join_world, leave_world
from hetjax.plans.worker_map import node_of
from hetjax.runtime.rpc.schema import Build, Compile, Leave, Message

_WITHOUT_OTHERS = (Build, Compile, Leave)  # may take long, and end by themselves


class HostGroup:
    """The world of `worker`, if there is one; it serves it on `host` if it is first.

    `limit_s` is how long a request may take that others have broken off.
    """

    def __init__(self, worker: str, host: str, limit_s: float) -> None:
        self._worker, self._host, self._limit_s = worker, host, limit_s
        self._world: World | None = None
        self._answering: tuple[int, type[Message]] | None = None

    def coordinate(self) -> str:
        """Where this process serves the world that it will be the first of."""
        return _free_address(self._host) if self._world is None else self._world.address

    def enter(self, world: World) -> None:
        """Join the others, once in the life of a process; raises BadInput."""
        if self._world is None:
            join_world(world)
            self._world = world
        if self._world != world:
            raise BadInput(
                got=f"worker {self._worker!r}, and another host of its node that was "
                "started later",
                allowed="hosts of a node that were started together",
                fix="start all workers of the node again",
            )

    def leave(self) -> None:
        """Part from the others in good order."""
        if self._world is not None:
            leave_world()

    def begin(self, number: int, request: type[Message]) -> None:
        """Remember what is to be answered next, as soon as it has arrived."""
        self._answering = number, request

    def done(self, lost: str | None, close: Callable[[], None]) -> None:
        """It has been answered; close and end if a host of the node was lost on it."""
        self._answering = None
        if self._world is None or lost is None:
            return
        if node_of(lost) == node_of(self._worker):
            close()
            _stop(f"worker {self._worker} ends: {lost}, of the same node, is lost")

    def break_off(self) -> None:
        """End the process unless it has answered within the limit."""
        if self._world is None or self._answering is None:
            return
        if self._answering[1] not in _WITHOUT_OTHERS:
            timer = threading.Timer(self._limit_s, self._check, [self._answering])
            timer.daemon = True
            timer.start()

    def _check(self, answering: tuple[int, type[Message]]) -> None:
        if self._answering == answering:
            _stop(
                f"worker {self._worker} is stuck in {answering[1].__name__}, broken off"
            )


def _free_address(host: str) -> str:
    """An address of this machine that nobody listens at."""
    found, address = listen(f"{host}:0")
    found.close()
    return address


def _stop(reason: str) -> None:
    with suppress(OSError):  # a full disk under the log must not keep us here
        print(reason, file=sys.stderr, flush=True)
    os._exit(1)  # threads may wait for what never comes
