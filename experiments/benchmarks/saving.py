# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a checkpoint: its bytes per second, and the slowdown of steps.

    python -m experiments.benchmarks.saving [--only throughput] [--directory DISK]

`throughput`: a writer saves the state of a model, about 1 GiB of float32, and commits
it (checksums, fsync, manifest). `plain`: the same bytes in as many files of one folder,
written by four threads, each file fsynced. Both alternate on one file system, each into
a new folder, with nothing else left to write back. Nothing is removed before the end (2
GiB per round): ext4 makes files slowly for a minute after thousands were removed.
`share` is the median over rounds of plain / the writer's time.

`overhead`: mean time of 20 steps after the start of a checkpoint over that of 20 steps
without, alternating in one process; the state is on disk before a window ends.
`overhead` is the median over pairs, less one; `overhead_of_means` compares the means of
all windows. A checkpoint's cost is constant, so the overhead is larger for shorter
steps. Prints one JSON object.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

from experiments.benchmarks.one_jit import even_pipeline, random_batch
from hetjax.checkpoint.format import Entry
from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.runtime.execution.stage_runtime import StageRuntime

NUM_THREADS = 4
WINDOW_STEPS = 20
MICROBATCH_SIZE = 2

State = list[tuple[Entry, np.ndarray]]


def large() -> Model:
    """Return a model of 90 million parameters: 1 GiB with AdamW's two moments."""
    return llama_model(
        LlamaConfig(
            name="large",
            vocab_size=8_192,
            hidden_size=768,
            inner_size=2_048,
            num_blocks=11,
            num_heads=12,
            num_kv_heads=12,
            max_seq_len=256,
        )
    )


def small() -> Model:
    """Return a model of 8 million parameters, which one or two CPU cores can train."""
    return llama_model(
        LlamaConfig(
            name="small",
            vocab_size=2_048,
            hidden_size=512,
            inner_size=1_408,
            num_blocks=2,
            num_heads=8,
            num_kv_heads=8,
            max_seq_len=128,
        )
    )


def runtime(model: Model, microbatches: int = 1) -> StageRuntime:
    plan = even_pipeline(model, 1, microbatches, MICROBATCH_SIZE)
    return StageRuntime(plan, model, {"node": jax.devices()}, optax.adamw(1e-3))


def random_state(model: Model) -> State:
    """Return random values for all that a run of the model saves, without a run."""
    rng = np.random.default_rng(0)
    return [
        (entry, rng.standard_normal(entry.shape, np.float32).astype(entry.dtype))
        for entry in {e.name: e for e in runtime(model).needed()}.values()
    ]


def throughput(directory: Path, rounds: int) -> dict[str, Any]:
    state = random_state(large())
    files = saved_files(directory / "first", state)
    times: list[tuple[float, float]] = []
    for number in range(rounds):
        os.sync()
        saver_s = save(directory / f"saver_{number}", state)
        os.sync()
        times.append((saver_s, write_plainly(directory / f"plain_{number}", files)))
    num_bytes = sum(map(len, files))
    return {
        "bytes": num_bytes,
        "files": len(files),
        "entries": len(state),
        "saver_gb_per_s": round(num_bytes / 1e9 / median(s for s, _ in times), 3),
        "plain_gb_per_s": round(num_bytes / 1e9 / median(p for _, p in times), 3),
        "share": round(median(p / s for s, p in times), 3),
        "rounds_saver_plain_s": [(round(s, 3), round(p, 3)) for s, p in times],
    }


def saved_files(directory: Path, state: State) -> list[bytes]:
    """Save a checkpoint, which also warms up; return the contents of its files."""
    save(directory, state)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path.read_bytes() for path in paths]


def save(directory: Path, state: State) -> float:
    with CheckpointWriter(directory, "embedded") as writer:
        start_s = time.perf_counter()
        writer.save(1, state, host={"step": 1})
        writer.wait()
        took_s = time.perf_counter() - start_s
    assert steps(directory) == [1]
    return took_s


def write_plainly(directory: Path, files: Sequence[bytes]) -> float:
    def write(number: int) -> None:
        with (directory / str(number)).open("wb", buffering=0) as file:
            file.write(files[number])
            os.fsync(file.fileno())

    directory.mkdir()
    start_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(len(files))))
    return time.perf_counter() - start_s


def overhead(
    directory: Path, pairs: int, keep: int, microbatches: int
) -> dict[str, Any]:
    run = runtime(small(), microbatches)
    run.initialise(0)
    state_bytes = sum(value.nbytes for _, value in run.entries())
    with CheckpointWriter(directory / "run", "embedded", keep) as writer:
        window(run, writer, 0)
        times = [
            (window(run, writer, 2 * pair + 1), window(run, None, 2 * pair + 2))
            for pair in range(pairs)
        ]
    return {
        "state_bytes": state_bytes,
        "keep": keep,
        "steps_per_checkpoint": WINDOW_STEPS,
        "tokens_per_step": run.plan.global_batch * run.plan.seq_len,
        "step_s_with": round(median(w for w, _ in times), 4),
        "step_s_without": round(median(n for _, n in times), 4),
        "overhead": round(median(w / n for w, n in times) - 1, 4),
        "overhead_of_means": round(_ratio_of_means(times) - 1, 4),
        "pairs_with_without_s": [(round(w, 4), round(n, 4)) for w, n in times],
    }


def _ratio_of_means(times: Sequence[tuple[float, float]]) -> float:
    return sum(w for w, _ in times) / sum(n for _, n in times)


def window(run: StageRuntime, writer: CheckpointWriter | None, number: int) -> float:
    """Return mean seconds per step. With a writer, a checkpoint starts first, as in a
    run."""
    batch = random_batch(run.plan, run.model.vocab_size)
    first = number * WINDOW_STEPS
    last = None
    start_s = time.perf_counter()
    if writer is not None:
        assert writer.save(first, run.entries(), host={"step": first})
    for step in range(first, first + WINDOW_STEPS):
        result = run.step(step, batch)
        assert last is None or np.isfinite(last.loss())
        last = result
    jax.block_until_ready([state.masters for state in run.stages.values()])
    took_s = time.perf_counter() - start_s
    assert writer is None or not writer.busy, "a window is too short for a checkpoint"
    return took_s / WINDOW_STEPS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("throughput", "overhead"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--directory", help="on the disk to measure, not in memory")
    given = parser.parse_args(arguments)
    simulate_devices(1)
    found: dict[str, Any] = {"cores": os.cpu_count(), "jax": jax.__version__}
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        if given.only != "overhead":
            found["throughput"] = throughput(Path(name), given.rounds)
        if given.only != "throughput":
            found["overhead"] = overhead(
                Path(name), given.pairs, given.keep, given.microbatches
            )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
