# SPDX-License-Identifier: Apache-2.0
"""Joins a worker with those of the other hosts of its node: they depend on each other.

Owns entering and leaving their world, and ending the process once it is useless: a host
of the node is lost, or a program waits for one for ever. Does not own the settings of a
world (`hetjax/mesh/multihost.py`) nor who is told to enter which (`runtime/control/`).
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

_WITHOUT_OTHERS = (Build, Compile, Leave)  # may take long, but end by themselves


class HostGroup:
    """The world of `worker`, if there is one; its first host serves it on `host`.

    `limit_s` is how long an aborted request may take.
    """

    def __init__(self, worker: str, host: str, limit_s: float) -> None:
        self._worker, self._host, self._limit_s = worker, host, limit_s
        self._world: World | None = None
        self._answering: tuple[int, type[Message]] | None = None

    def coordinate(self) -> str:
        """Return the address at which this process serves the world if it is first."""
        return _free_address(self._host) if self._world is None else self._world.address

    def enter(self, world: World) -> None:
        """Join the world, once in a process's life; raise BadInput for another one."""
        if self._world is None:
            join_world(world)
            self._world = world
        if self._world != world:
            raise BadInput(
                got=f"worker {self._worker!r}, but another host of its node was "
                "started later",
                allowed="hosts of a node that were started together",
                fix="start all workers of the node again",
            )

    def leave(self) -> None:
        """Leave the others in good order."""
        if self._world is not None:
            leave_world()

    def begin(self, number: int, request: type[Message]) -> None:
        """Record the request to be answered next, as soon as it has arrived."""
        self._answering = number, request

    def done(self, lost: str | None, close: Callable[[], None]) -> None:
        """Record the answer; close and end if it reports a host of the node as lost."""
        self._answering = None
        if self._world is None or lost is None:
            return
        if node_of(lost) == node_of(self._worker):
            close()
            _stop(f"worker {self._worker} ends: {lost}, of the same node, is lost")

    def abort(self) -> None:
        """End the process unless it answers within the limit."""
        if self._world is None or self._answering is None:
            return
        if self._answering[1] not in _WITHOUT_OTHERS:
            timer = threading.Timer(self._limit_s, self._check, [self._answering])
            timer.daemon = True
            timer.start()

    def _check(self, answering: tuple[int, type[Message]]) -> None:
        if self._answering == answering:
            _stop(f"worker {self._worker} is stuck in {answering[1].__name__}: stopped")


def _free_address(host: str) -> str:
    """Return an address of this machine at which nothing listens."""
    found, address = listen(f"{host}:0")
    found.close()
    return address


def _stop(reason: str) -> None:
    with suppress(OSError):  # a full disk under the log must not stop this
        print(reason, file=sys.stderr, flush=True)
    os._exit(1)  # threads may wait for ever
