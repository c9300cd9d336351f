# SPDX-License-Identifier: Apache-2.0
"""A worker process for tests: random plans, gradients kept and written to files."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hetjax.errors import BadInput
from hetjax.runtime.feeding import Batch
from hetjax.runtime.island import Island, Told
from hetjax.runtime.serving import read_post, serve
from tests.jax_settings import compile_quickly, strict_simulation
from tests.runtime.oracle import keep_gradients, kept_gradients, random_batch
from tests.runtime.random_plans import Case, random_case
from tests.runtime.random_weights import random_params

NODES = ("east", "north", "south", "west")
FAILING_STEP, REFUSED_STEP = 13, 14


class KeepingIsland(Island):
    """Writes the gradients of every step to `directory`, one file per step."""

    directory: Path

    def step(self, number: int, batch: Batch, observer: Any = None) -> Told:
        told = super().step(number, batch, observer)
        held = {
            f"{path}/{i}": value
            for path, values in kept_gradients(self).items()
            for i, value in enumerate(values)
        }
        np.savez(self.directory / f"{self.node}.npz", **held)  # pyright: ignore
        return told


@dataclass(frozen=True)
class RandomWork:
    case: Case
    island: Island

    def batch(self, step: int) -> Batch:
        if step == FAILING_STEP and self.island.node == NODES[0]:
            raise ValueError("no such batch")
        if step == REFUSED_STEP and self.island.node == NODES[0]:
            raise BadInput(got="step 14", allowed="any other", fix="give another")
        return random_batch(self.case.plan, self.case.model.vocab_size, step)

    def validation(self, number: int) -> Batch:
        return self.batch(number)


def random_work(worker: str, settings: Mapping[str, Any]) -> RandomWork:
    seed = settings["seed"]
    case = random_case(seed, settings["nodes"])
    island = KeepingIsland(
        case.plan, case.model, worker, jax.devices(), keep_gradients()
    )
    island.directory = Path(settings["directory"])
    params = random_params(case.model, seed)
    island.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    return RandomWork(case, island)


def main() -> None:
    post = read_post(sys.stdin.readline())
    strict_simulation()
    compile_quickly()
    serve(post, lambda settings: random_work(post.worker, settings))


if __name__ == "__main__":
    main()
