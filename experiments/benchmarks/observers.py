# SPDX-License-Identifier: Apache-2.0
"""Measures a run's cost of handing a journal line to observers.

    python -m experiments.benchmarks.observers [--lines 20000] > FILE

Prints one JSON object: CPU microseconds of the calling thread per line, by kind of
observer, as median, 99th percentile, mean and maximum. `idle` observers do nothing.
`slow` ones return from their first record only at the end, so all lines but the first
thousand are dropped. `tensorboard` writes. There is a pause between lines, as between
steps. Without a pause, a busy thread would hold the interpreter, which costs waiting,
not CPU.
"""

import argparse
import json
import os
import statistics
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetjax.training.observers.dispatch import Dispatcher
from hetjax.training.observers.loading import GivenObserver, observer_sources
from hetjax.training.observers.observer import Observer
from hetjax.training.observers.records import StartRecord

_PAUSE_S = 2e-4
_LINE = {
    "step": 1,
    "loss": 2.5,
    "tokens": 65_536,
    "step_time_s": 0.5,
    "tokens_per_s": 131_072.0,
    "grad_norm": 1.25,
    "learning_rate": 3e-4,
    "mfu": 0.4,
}


class Idle(Observer):
    """Does nothing."""


class Slow(Observer):
    """Returns from its first record only once `may_go` is set."""

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def on_start(self, record: StartRecord) -> None:
        self.may_go.wait()


def cpu_us(given: list[GivenObserver], num_lines: int) -> list[float]:
    """Return the CPU microseconds of handing over each line."""
    found: list[float] = []
    said: list[str] = []
    with TemporaryDirectory() as folder, Dispatcher(observer_sources(given)) as run:
        start = StartRecord(
            run="0" * 16, run_dir=Path(folder), step=0, steps=num_lines, settings={}
        )
        run.begin(start, said.append)
        for step in range(1, num_lines + 1):
            line = {**_LINE, "step": step}
            begin_ns = time.thread_time_ns()
            run.see_line(line)
            found.append((time.thread_time_ns() - begin_ns) / 1e3)
            time.sleep(_PAUSE_S)
        for each in given:
            if isinstance(each, Slow):
                each.may_go.set()
    return found


def summary(found: list[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[len(ordered) * 99 // 100], 2),
        "mean_us": round(statistics.mean(ordered), 2),
        "most_us": round(ordered[-1], 2),
    }


def measure(num_lines: int) -> dict[str, Any]:
    observers: dict[str, list[GivenObserver]] = {
        "none": [],
        "idle": [Idle],
        "slow": [Slow()],
        "tensorboard": ["tensorboard"],
        "five": [Idle] * 5,
    }
    return {
        "per_line": {
            name: summary(cpu_us(given, num_lines)) for name, given in observers.items()
        },
        "lines": num_lines,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    print(json.dumps(measure(parser.parse_args().lines), indent=1))


if __name__ == "__main__":
    main()
