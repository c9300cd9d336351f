# SPDX-License-Identifier: Apache-2.0
"""Trains a model in one way, in a process that takes steps on request.

    python -m experiments.gpu.models.way product --model llama-1b

Ways are `product` (hetjax's runtime, one stage), `jit` (the same model as one plain
jit) and `torch` (`torch_way.py`). The process prints a JSON line after compiling and
warming up. For each number of steps on standard input it prints a line with the seconds
of each step. At the end of the input it prints a line with its peak memory. Thus
several ways can share a card and be timed in turns.

Owns both ends of this exchange. Does not own what is compared (`parts/speed.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import jax
import optax

from experiments.benchmarks.one_jit import one_jit
from experiments.gpu.models.one_stage import (
    CLIP_NORM,
    KEY,
    OneStage,
    node_of,
    one_stage,
)
from experiments.gpu.rows import without_names
from experiments.gpu.setting import share_card
from hetjax.cluster.cluster import Node, Precision
from hetjax.models.presets import model_config
from hetjax.plans.plan import Remat

WAYS = ("product", "jit", "torch")
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all ways train: `microbatches` of `size` sequences in each step."""

    model: str
    seq_len: int
    microbatches: int
    size: int
    remat: Remat
    precision: Precision
    platform: str

    def stage(self, node: Node) -> OneStage:
        """Return the model as a one-stage plan on a device of this node."""
        config = replace(model_config(self.model), max_seq_len=self.seq_len)
        return one_stage(
            config,
            node,
            microbatches=self.microbatches,
            size=self.size,
            remat=self.remat,
            dtype=self.precision,
        )

    def options(self) -> list[str]:
        """Return the task as options of the command."""
        found = asdict(self).items()
        return [w for k, v in found for w in (f"--{k.replace('_', '-')}", str(v))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A model that can take steps. `step` returns when the device has finished it.

    `memory` returns the allocator's figures under JAX's names; empty if none."""

    step: Callable[[], None]
    peak_bytes: Callable[[], int | None]
    about: dict[str, Any]
    memory: Callable[[], dict[str, int]] = dict


class WayFailed(Exception):
    """A way's process has ended; its last output says why."""


class Way:
    """The caller's handle of a way that runs in its own process."""

    def __init__(
        self, name: str, task: Task, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the process with these variables added to this environment."""
        command = [
            sys.executable,
            "-m",
            "experiments.gpu.models.way",
            name,
            *task.options(),
        ]
        self.name, self._peak_bytes = name, None
        self.memory: dict[str, int] = {}  # set by `end`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (environment or {}),
        )

    def ready(self) -> dict[str, Any]:
        """Wait until the process has warmed up; return its description of itself."""
        return self._answer()

    def steps_s(self, number: int) -> list[float]:
        """Let the process take `number` steps; return the seconds of each."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return self._answer()["steps_s"]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int | None:
        """End the process if it still runs. Return its peak memory in bytes, where the
        device reports it."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
            last = self._answer()
            self._peak_bytes, self.memory = last["peak_bytes"], last["memory"]
            self._process.wait()
        return self._peak_bytes

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        printed = ""
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print, too
                return json.loads(line)
            printed += line
        raise WayFailed(f"exit code {self._process.wait()}; {without_names(printed)}")


def product(task: Task) -> Trained:
    """Return the model that hetjax's runtime trains, as in a run."""
    device = jax.local_devices(backend=task.platform)[0]
    stage = task.stage(node_of(device))
    runtime = stage.runtime(device, optax.adamw(1e-4), clip_norm=CLIP_NORM)
    runtime.compile()
    compiling_bytes = peak_bytes(device)  # a compiler tries kernels on the device
    runtime.initialise(0)
    batch, number = stage.batch(), 0

    def step() -> None:
        nonlocal number
        runtime.step(number, batch, loss_scale=stage.loss_scale)
        jax.block_until_ready([state.params for state in runtime.stages.values()])
        number += 1

    about = {"temp_bytes": runtime.temp_bytes()[KEY], "compiling": compiling_bytes}
    return Trained(
        step=step,
        peak_bytes=lambda: peak_bytes(device),
        about=about,
        memory=lambda: device.memory_stats() or {},
    )


def jit(task: Task) -> Trained:
    """Return the same mathematics, microbatches and optimizer as one jitted program."""
    device = jax.local_devices(backend=task.platform)[0]
    stage = task.stage(node_of(device))
    held, train = one_jit(
        stage.model,
        stage.plan,
        device,
        optax.adamw(1e-4),
        clip_norm=CLIP_NORM,
        dtype=stage.precision,
    )
    batch = stage.batch()

    def step() -> None:
        nonlocal held
        *held, _ = train(*held, *batch)
        jax.block_until_ready(held)

    return Trained(step=step, peak_bytes=lambda: peak_bytes(device), about={})


def peak_bytes(device: jax.Device) -> int | None:
    """Return this process's peak memory so far; None on CPUs, which report none."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def serve(trained: Trained) -> None:
    """Warm up, then take as many steps as each line of the input says."""
    for _ in range(WARM_UP_STEPS):
        trained.step()
    print(json.dumps(trained.about), flush=True)
    for line in sys.stdin:
        times_s = [_timed_s(trained.step) for _ in range(int(line))]
        print(json.dumps({"steps_s": times_s}), flush=True)
    last = {"peak_bytes": trained.peak_bytes(), "memory": trained.memory()}
    print(json.dumps(last), flush=True)


def _timed_s(step: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    step()
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--seq-len", type=int, default=2_048)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--remat", default="none", choices=get_args(Remat))
    parser.add_argument("--precision", default="bfloat16", choices=get_args(Precision))
    parser.add_argument("--platform", default="cuda")
    arguments = vars(parser.parse_args())
    name, task = arguments.pop("way"), Task(**arguments)
    share_card()
    if name == "torch":
        from experiments.gpu.models.torch_way import (
            by_torch,  # needs libraries that may be missing
        )

        serve(by_torch(task))
    else:
        serve({"product": product, "jit": jit}[name](task))


if __name__ == "__main__":
    main()
