# SPDX-License-Identifier: Apache-2.0
"""A worker process for tests: runs random plans and writes its gradients to files."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import jax
import numpy as np

from hetjax.comm.connections import Key
from hetjax.data.batches import Batch
from hetjax.errors import BadInput
from hetjax.mesh.multihost import world_devices
from hetjax.plans.worker_map import WorkerMap, file_name, node_of
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.worker.bootstrap import read_bootstrap
from hetjax.runtime.worker.server import serve
from tests.jax_settings import compile_quickly, strict_simulation
from tests.runtime.oracle import keep_gradients, kept_gradients, random_batch
from tests.runtime.packed_cases import packed_batch, packed_case
from tests.runtime.random_plans import Case, random_case
from tests.runtime.random_weights import random_params
from tests.runtime.spanning_plans import NODES as SPANNING_NODES
from tests.runtime.spanning_plans import spanning_case

NODES = ("east", "north", "south", "west")
FAILING_STEP, REFUSED_STEP = 1013, 1014  # no seed of a random plan


class KeepingRuntime(StageRuntime):
    """A runtime that writes the gradients of each step to a file in `directory`."""

    directory: Path
    half_sent: int | None = None  # the turn of the step that sends half

    def step(self, number: int, batch: Batch, *others: Any) -> StepCommit:
        if number == self.half_sent and self.worker == "single":
            self._send_half()
        told = super().step(number, batch, *others)
        held = {
            f"{path}/{i}": value
            for path, values in kept_gradients(self).items()
            for i, value in enumerate(values)
        }
        file = self.directory / f"{file_name(self.worker)}.npz"
        np.savez(file, **held)  # pyright: ignore
        self._write_sent(file.with_suffix(".json"))
        return told

    def _write_sent(self, path: Path) -> None:
        """Write all bytes sent over these links so far, as [receiver, kind, bytes]."""
        assert self._joined is not None
        sent = self._joined.peers.sent.by_link_and_kind()
        path.write_text(json.dumps([[*to, size] for to, size in sent.items()]))

    def _send_half(self) -> None:
        """Act as lost once one host of a node has its part, and the other has not."""
        assert self._joined is not None
        peers = self._joined.peers
        send = peers.send

        def to_first(peer: str, key: Key, parts: Sequence[np.ndarray]) -> None:
            if peer == "slice/0":
                send(peer, key, parts)
                Timer(0.3, lambda: peers.mailbox.lose(self.worker, "is gone")).start()

        peers.send = to_first


@dataclass(frozen=True)
class RandomWork:
    case: Case
    runtime: StageRuntime

    def close(self) -> None:
        self.runtime.close()

    def batch(self, step: int) -> Batch:
        if step == FAILING_STEP and self.runtime.worker == NODES[0]:
            raise ValueError("no such batch")
        if step == REFUSED_STEP and self.runtime.worker == NODES[0]:
            raise BadInput(got=f"step {step}", allowed="any other", fix="give another")
        if self.case.plan.packed:
            return packed_batch(self.case, step)
        return random_batch(self.case.plan, self.case.model.vocab_size, step)

    def validation(self, number: int) -> Batch:
        return self.batch(number)


def random_work(worker: str, settings: Mapping[str, Any]) -> RandomWork:
    seed = settings["seed"]
    if "case" in settings:
        case, nodes = spanning_case(settings["case"]), SPANNING_NODES
    else:
        make = packed_case if settings.get("packed") else random_case
        case, nodes = make(seed, settings["nodes"]), ()
    devices = jax.local_devices()
    for node in nodes:
        if node.hosts > 1 and worker in node.workers:
            index = node.workers.index(worker)
            devices = world_devices(index, node.hosts, node.devices_per_host)
    runtime = KeepingRuntime(
        case.plan,
        case.model,
        {node_of(worker): devices},
        keep_gradients(),
        worker=worker,
        members=WorkerMap(case.plan, tuple(nodes)),
    )
    runtime.directory = Path(settings["directory"])
    runtime.half_sent = settings.get("half_sent")
    params = random_params(case.model, seed)
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    return RandomWork(case, runtime)


def main() -> None:
    bootstrap = read_bootstrap(sys.stdin.readline())
    strict_simulation()
    compile_quickly()
    serve(bootstrap, lambda settings: random_work(bootstrap.worker, settings))


if __name__ == "__main__":
    main()
