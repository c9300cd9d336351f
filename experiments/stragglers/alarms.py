# SPDX-License-Identifier: Apache-2.0
"""Counts false alarms of the straggler detector on resampled steps of real runs.

    python -m experiments.stragglers.alarms [--record] [--steps 10000] [--real 1000]

`--record` trains preset `tiny` three times on this machine's CPU: in one process, on
worker processes, and on packed sequences, whose work varies by batch. It records the
time of each part of each step in `experiments/results/step_times.json`. Without it, the
study draws recorded steps, with replacement and fixed seeds, and gives them to the
detector. `alarms` are the findings in `--steps` steps of each run. `drifts` has 60
series for each factor (1.25, 1.5 and 2) by which one node is slower from step 101 on,
the nodes in turn: how many times the detector named that node within 10 and 40 steps,
the median number of steps until then, and the least and greatest ratio of the found to
the true factor. Other programs ran on the machine, so steps are noisier than a
device's: `noise` is the deviation of the logarithm of the noisiest part, as the
detector sees it.

`--real` trains the same models for so many steps instead, and lists the alarms. Each
has `measured`: the median time of the named devices from the alarm's `since` to the
step of the alarm, over their median in the 200 steps before.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from experiments.machine import machine
from hetjax.costs.slowness.detector import NUM_COLD, Detector
from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.sequential import reference
from hetjax.costs.slowness.series import logs, series, watched
from hetjax.costs.slowness.step_times import Lane, Lanes, StepTimes
from hetjax.train import main as train
from hetjax.training.observers import slow_devices
from hetjax.training.observers.slow_devices import SlowDevices

RECORDED = Path(__file__).parents[1] / "results" / "step_times.json"
_TEXT = Path(__file__).parents[2] / "LICENSE"
_STEPS, AT, _DRAWS = 60, 101, 60
_FACTORS = (1.25, 1.5, 2.0)
_SMALL = "--evaluation.sample-tokens 0 --evaluation.num-batches 1".split()
_SMALL += "--evaluation.every 0 --checkpoint.every 0 --watch-speeds on".split()
_SHORT = ["--global-batch", "16"]  # a step of a tenth of a second
_RUNS = {
    "pipeline": ["--seq-len", "64"],
    "workers": ["--seq-len", "64", "--launcher", "processes"],
    "packed": ["--seq-len", "64", "--data.pack", "True"],
}


@dataclass(frozen=True, slots=True)
class _Watched:
    """A run that was trained: its lanes, its timed steps, and the findings."""

    lanes: Lanes
    heard: list[StepTimes]
    found: list[Slowdown]


def record() -> dict[str, Any]:
    """Train, and return the times of the steps as JSON values."""
    return {
        "command": "python -m experiments.stragglers.alarms --record",
        "machine": machine(),
        "runs": {name: _values(run) for name, run in _trained(_STEPS).items()},
    }


def real(num_steps: int) -> dict[str, Any]:
    """Train all runs for so many steps, and return their alarms as JSON values."""
    return {
        "command": f"python -m experiments.stragglers.alarms --real {num_steps}",
        "machine": machine(),
        "runs": {
            name: {
                "timed_steps": len(run.heard),
                "alarms": [
                    {"alarm": str(one), "measured": _ratio(one, run.heard)}
                    for one in run.found
                ],
            }
            for name, run in _trained(num_steps, *_SHORT).items()
        },
    }


def _trained(num_steps: int, *more: str) -> dict[str, _Watched]:
    with TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(_TEXT.read_text())
        command = ["tiny", "--data.path", str(text), *_SMALL, *more]
        command += ["--data.cache-dir", str(Path(folder, "cache"))]
        command += ["--steps", str(num_steps)]
        return {
            name: _watched([*command, "--run-dir", str(Path(folder, name)), *options])
            for name, options in _RUNS.items()
        }


def _watched(command: Sequence[str]) -> _Watched:
    watching, heard, found = list[Lanes](), list[StepTimes](), list[Slowdown]()
    begun, added = SlowDevices.begin, SlowDevices.add

    def begin(self: SlowDevices, *args: Any) -> None:
        begun(self, *args)
        lanes = self._detector.lanes
        assert lanes is not None
        watching.append(lanes)

    def add(self: SlowDevices, times: StepTimes) -> list[Slowdown]:
        heard.append(times)
        new = added(self, times)
        found.extend(new)
        return new

    with (
        patch.object(SlowDevices, "begin", begin),
        patch.object(SlowDevices, "add", add),
        patch.object(slow_devices, "_MOST_SHARE", 1.0),  # else few steps would be timed
    ):
        assert train(command) == 0
    return _Watched(watching[0], heard, found)


def _values(run: _Watched) -> dict[str, Any]:
    """Return a run as JSON values."""
    parts = sorted(set.intersection(*({*times.parts} for times in run.heard)))
    return {
        "lanes": [
            {"key": list(lane.key), "node": lane.node, "devices": list(lane.devices)}
            for lane in run.lanes.lanes
        ],
        "parts": [list(part) for part in parts],
        "seconds": [[round(t.parts[p], 6) for p in parts] for t in run.heard],
    }


def _ratio(found: Slowdown, heard: Sequence[StepTimes]) -> float | None:
    """Return how many times as long the named devices took; None for links and
    recoveries, and if nearly nothing was measured before."""
    named = found.subject.lanes
    if found.is_over or not named:
        return None
    took_s = {
        times.step: sum(s for part, s in times.parts.items() if part[:2] in named)
        for times in heard
    }
    since, until = found.since, found.step
    after = [s for step, s in took_s.items() if since <= step <= until]
    before = [s for step, s in took_s.items() if since - 200 <= step < since]
    if len(before) < 10:
        return None
    return round(median(after) / median(before), 3)


def recorded(run: dict[str, Any]) -> tuple[Lanes, list[StepTimes]]:
    """Return a run's lanes and steps, without its first steps."""
    lanes = Lanes(
        tuple(
            Lane(key=tuple(x["key"]), node=x["node"], devices=tuple(x["devices"]))
            for x in run["lanes"]
        )
    )
    parts = [tuple(part) for part in run["parts"]]
    steps = [
        StepTimes(step=n, parts=dict(zip(parts, row, strict=True)), links={})
        for n, row in enumerate(run["seconds"])
    ]
    return lanes, steps[NUM_COLD:]


def drawn(steps: Sequence[StepTimes], number: int, seed: int) -> Iterator[StepTimes]:
    """Draw steps with replacement, and number them from 1."""
    chosen = np.random.default_rng(seed).integers(0, len(steps), number)
    for n, at in enumerate(chosen, start=1):
        yield replace(steps[at], step=n)


def findings(lanes: Lanes, steps: Iterator[StepTimes]) -> list[Slowdown]:
    """Return the detector's findings on these steps."""
    detector = Detector()
    detector.begin(lanes)
    return [finding for times in steps for finding in detector.add(times)]


def drifting(
    lanes: Lanes, steps: Iterator[StepTimes], node: str, factor: float
) -> Iterator[StepTimes]:
    """Yield the same steps, where a node takes `factor` times as long from `AT` on."""
    slow = lanes.on(node)
    for times in steps:
        if times.step >= AT:
            parts = {
                part: took_s * (factor if part[:2] in slow else 1.0)
                for part, took_s in times.parts.items()
            }
            times = replace(times, parts=parts)
        yield times


def study(runs: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Return the result, as JSON values."""
    return {name: _of_run(*recorded(run), num_steps) for name, run in runs.items()}


def _of_run(lanes: Lanes, steps: list[StepTimes], num_steps: int) -> dict[str, Any]:
    alarms = findings(lanes, drawn(steps, num_steps, seed=0))
    what = watched(lanes, steps)
    as_seen = logs(steps, what)
    sigma_K = reference(series(as_seen, as_seen.medians(), what).apart_NK).sigma_K
    return {
        "recorded": len(steps),
        "noise": round(float(sigma_K[: len(what.parts)].max()), 3),
        "steps": num_steps,
        "alarms": [str(alarm) for alarm in alarms],
        "drifts": {
            f"{factor:.0%}": _drifts(lanes, steps, factor) for factor in _FACTORS
        },
    }


def _drifts(lanes: Lanes, steps: list[StepTimes], factor: float) -> dict[str, Any]:
    nodes = sorted({lane.node for lane in lanes.lanes})
    delays, ratios = list[int](), list[float]()
    for seed in range(_DRAWS):
        node = nodes[seed % len(nodes)]
        there = drawn(steps, AT + 40, seed=seed + 1)
        for finding in findings(lanes, drifting(lanes, there, node, factor)):
            if finding.subject.name == node and finding.step >= AT:
                delays.append(finding.step - AT + 1)
                ratios.append(finding.factor / factor)
                break
    return {
        "draws": _DRAWS,
        "found_in_10": sum(delay <= 10 for delay in delays),
        "found_in_40": len(delays),
        "median_steps": median(delays) if delays else None,
        "factor_over_true": [round(min(ratios), 3), round(max(ratios), 3)]
        if ratios
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--real", type=int)
    given = parser.parse_args()
    if given.real is not None:
        print(json.dumps(real(given.real), indent=1))
        return
    if given.record:
        RECORDED.write_text(json.dumps(record()) + os.linesep)
        return
    runs = json.loads(RECORDED.read_text())
    result = {
        "command": "python -m experiments.stragglers.alarms",
        "recorded_on": runs["machine"],
        "runs": study(runs["runs"], given.steps),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
