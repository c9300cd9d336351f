# SPDX-License-Identifier: Apache-2.0
"""Defines the launcher `embedded`: the run is one process, which is also the worker.

Owns the connection to the worker: a request is the message itself, its handler runs on
the caller's thread, and errors reach the caller. Owns also for which of the present
nodes this process has devices, and the warnings about the others. Does not own which
nodes are present (`training/recovery/membership.py`) nor what a worker does
(`runtime/worker/`).
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.launchers.launcher import Launcher, LaunchRequest
from hetjax.mesh.process_setup import keep_compiled
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.rpc.message import answer_of
from hetjax.runtime.rpc.schema import Compiling, Json, Noticed, Request
from hetjax.runtime.rpc.worker_connections import Answer, Progress
from hetjax.runtime.worker.service import Work, WorkerService


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    """Make the launcher `embedded`."""
    keep_compiled(request.cache_dir)
    return InThisProcess(request.cluster, request.work, stack)


class InThisProcess:
    """One worker, which gets its work from `make`; `stack` ends it.

    It has the devices of the nodes of `cluster` and gets no others: JAX has them from
    its start.
    """

    def __init__(
        self, cluster: Cluster, make: Callable[[Json], Work], stack: ExitStack
    ) -> None:
        self.connections = InProcessConnections(EMBEDDED, make)
        stack.callback(self.connections.close)
        self._had = {node.name: node for node in cluster.nodes}
        self._seen = self._present = cluster
        self._refused = set[Node]()

    def start(self, workers: Sequence[str]) -> None:
        """Do nothing: the worker is this process."""

    def begin(self, workers: Sequence[str]) -> None:
        """Do nothing: the worker is this process."""

    def are_there(self, workers: Sequence[str]) -> bool:
        return True

    @property
    def pids(self) -> Mapping[str, int]:
        return {EMBEDDED: os.getpid()}

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """Return the nodes that have devices here; if none has, the previous ones."""
        if cluster != self._seen:
            self._seen = cluster
            usable = tuple(filter(None, map(self._here, cluster.nodes)))
            if usable:
                kept = part_of(cluster, {node.name for node in usable})
                self._present = replace(kept, nodes=usable)
            else:
                names = ", ".join(node.name for node in self._present.nodes)
                warnings.warn(
                    "the cluster has no node with devices here: the run keeps its plan "
                    f"on {names}",
                    stacklevel=2,
                )
        return self._present

    def _here(self, node: Node) -> Node | None:
        """Return what this process has of a node; warn once if that differs."""
        had = self._had.get(node.name)
        if had and had.device == node.device and had.count >= node.count:
            return node
        if node not in self._refused:
            self._refused.add(node)
            as_ = f"used as {had.count} x {had.device}" if had else "not used"
            warnings.warn(
                f"node {node.name!r} ({node.count} x {node.device}) is {as_}: this "
                "process gets no other devices while it runs; stop the run (it saves "
                "its state) and start it again to use the node",
                stacklevel=2,
            )
        return had


class InProcessConnections:
    """Connections to the only worker, which cannot be lost; `make` makes its work."""

    def __init__(self, worker: str, make: Callable[[Json], Work]) -> None:
        self.only, self.workers, self.epoch = worker, [worker], 0
        self.noticed: Callable[[str, Noticed], None] = lambda worker, notice: None
        self._progress: Progress | None = None
        self._service = WorkerService(worker, make, tell=self._tell)

    def ask(
        self,
        requests: Mapping[str, Request[Answer]],
        progress: Progress | None = None,
    ) -> dict[str, Answer]:
        """Return the worker's answer; raise what its handler raises."""
        self._progress = progress
        return {worker: self._answer(request) for worker, request in requests.items()}

    def lose(self, worker: str, reason: str) -> None:
        raise RuntimeError(f"{worker!r} is this process: {reason}")

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Do nothing: nothing here waits."""
        yield

    def close(self) -> None:
        """Finish what is being written."""
        self._service.close()

    def _answer(self, request: Request[Answer]) -> Answer:
        answer = self._service.answer(replace(request, epoch=self.epoch))
        assert isinstance(answer, answer_of(type(request))), (request, answer)
        return answer

    def _tell(self, compiling: Compiling) -> None:
        if self._progress is not None:
            self._progress(self.only, compiling)
