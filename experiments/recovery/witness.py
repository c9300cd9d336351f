# SPDX-License-Identifier: Apache-2.0
"""Runs a worker process with a made-up state that reports the bits of its state.

Owns a model of a few leaves, states that are a function of a seed, and checksums. Each
worker writes these to a file whenever its devices get another state; they come from the
devices, not from the restored data. Does not train, and needs no data.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import numpy as np
import optax

from hetjax.checkpoint.format import Entry, split_leaves
from hetjax.data.batches import Batch
from hetjax.files.writing import write_whole
from hetjax.mesh import axes
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.plans.worker_map import WorkerMap, file_name
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.state import Read
from hetjax.runtime.worker.bootstrap import read_bootstrap
from hetjax.runtime.worker.server import serve

MODEL = llama_model(
    LlamaConfig(
        name="few-leaves",
        vocab_size=12,
        vocab_multiple=4,
        hidden_size=4,
        inner_size=12,
        num_blocks=1,
        num_heads=2,
        num_kv_heads=2,
        max_seq_len=8,
    )
)
STAGES = "east", "north", "south"  # the nodes of the first replica
WHOLE = "west"  # the node of the second replica, which holds the whole state
_NUM_DEVICES = 2
Checksums = dict[str, int]  # by leaf


def witness_plan() -> Plan:
    """Return a plan with a replica of three stages, and one of a single stage.

    The single stage has two tensor ranks.
    """
    stages = tuple(
        Stage(
            node=node, devices=(0,), layers=(layer, layer + 1), launch_ahead=3 - layer
        )
        for layer, node in enumerate(STAGES)
    )
    mesh = StageMesh(tensor=_NUM_DEVICES)
    whole = Stage(node=WHOLE, devices=(0, 1), mesh=mesh, layers=(0, 3), launch_ahead=1)
    replicas = tuple(
        Replica(num_microbatches=3, microbatch_size=1, stages=held)
        for held in (stages, (whole,))
    )
    return Plan(model=MODEL.name, seq_len=8, global_batch=6, replicas=replicas)


def witness_settings(directory: Path) -> dict[str, Any]:
    """Return the workers' settings as JSON values; workers write to `directory`."""
    return {"plan": plan_json(witness_plan()), "directory": str(directory)}


def told(directory: Path, worker: str) -> Checksums:
    """Return the checksums that a worker wrote of its devices' state."""
    return json.loads((directory / f"{file_name(worker)}.json").read_text())


def made_up(seed: int) -> Read:
    """Return a function that gives any entry values, which depend on the seed."""

    def read(entry: Entry) -> np.ndarray:
        named = google_crc32c.value(entry.name.encode())
        rng = np.random.default_rng([seed, named])
        value = 1e3 * rng.standard_normal(entry.shape, np.float32)
        return np.asarray(value).astype(entry.dtype)

    return read


class WitnessRuntime(StageRuntime):
    """Writes the checksum of each leaf that it holds; starts with a made-up state."""

    directory: Path

    def initialise(self, seed: int) -> None:
        self.restore(made_up(seed))

    def restore(self, read: Read) -> None:
        super().restore(read)
        found: Checksums = {
            leaf: google_crc32c.value(np.ascontiguousarray(value).tobytes())
            for entry, read_ in self.held()
            for leaf, value in split_leaves(entry, read_())
        }
        file = self.directory / f"{file_name(self.worker)}.json"
        write_whole(file, json.dumps(found))


@dataclass(frozen=True)
class WitnessWork:
    runtime: StageRuntime

    def close(self) -> None:
        self.runtime.close()

    def batch(self, step: int) -> Batch:
        raise NotImplementedError("a witness does not train")

    def validation(self, number: int) -> Batch:
        return self.batch(number)


def witness_work(worker: str, settings: Mapping[str, Any]) -> WitnessWork:
    axes.MIN_SLICE_SIZE = 1  # several slices of an array, without large arrays
    simulate_devices(_NUM_DEVICES)
    plan = parse_plan(settings["plan"])
    runtime = WitnessRuntime(
        plan,
        MODEL,
        {worker: jax.local_devices()},
        optax.lion(1e-3),
        worker=worker,
        members=WorkerMap(plan),
    )
    runtime.directory = Path(settings["directory"])
    return WitnessWork(runtime)


def main() -> None:
    bootstrap = read_bootstrap(sys.stdin.readline())
    serve(bootstrap, lambda settings: witness_work(bootstrap.worker, settings))


if __name__ == "__main__":
    main()
