# SPDX-License-Identifier: Apache-2.0
"""Measures how well a run's calibration predicts its own plan and another one.

    python -m experiments.accuracy.calibrated [--json] [--mixes 6] [--profile]

Hosts are control groups with shares of a core (as root); hetjax only knows that they
are different kinds of device. Two plans use all hosts: `samples` gives each the whole
model and a share of the samples, `layers` is one pipeline over all. `hetjax train` runs
each plan, measures the first steps and writes `calibration.json`; it treats these CPUs
as the devices themselves, not as stand-ins. Each plan is then predicted with the file
of either run, as by `hetjax simulate --calibration`. With `--profile` the layers of all
hosts are measured first, and all predictions use these times, those of the runs too.

`measured_s` is the median of the steps after those that the run learns from; `noise` is
the relative difference between the medians of their even and their odd ones. `own` and
`other` are a plan's predicted over its measured time, with the file of its own run and
with that of the other plan's; `without` uses no file. `other_in_interval`: whether the
90 % interval by the other plan's file holds the measured time.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import hetjax
from experiments.islands.unequal import cluster_of as testbed_of
from experiments.islands.unequal import profiled
from experiments.machine import machine
from experiments.testbed.hosts import Host
from experiments.testbed.placed_runs import Hosts, hosts, run
from hetjax.cluster.cluster import Cluster
from hetjax.costs.measured.layer_profile import write_profile
from hetjax.models.named import TypedName, load_named
from hetjax.planner.baselines.stage_costs import shared_out
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.report.prediction import SimulatedStep
from hetjax.training import open_run
from hetjax.training.directory.rundir import PROFILE
from hetjax.training.observers.step_comparison import StepComparison

MIXES = (
    (60.0, 20.0),
    (40.0, 40.0),
    (30.0, 90.0),
    (50.0, 25.0, 25.0),
    (20.0, 40.0, 60.0),
    (80.0, 40.0, 20.0),
)
_MODEL, _SEQ_LEN, _BATCH, _SIZE = "tiny", 128, 48, 4
_STEPS, _LEARNT = 22, 12
_COMMAND = "python -m experiments.accuracy.calibrated --json"
_LAYERS = len(load_named(TypedName(_MODEL)).layers)


def cluster_of(percents: Sequence[float]) -> Cluster:
    """Return hosts that differ in kind only; one kind for hosts of one share."""
    hosts = (Host(name=f"host-{i}", cpu_percent=p) for i, p in enumerate(percents))
    return testbed_of([*hosts])


def plans(percents: Sequence[float]) -> dict[str, Plan]:
    """Return both plans of a mix."""
    by_samples = tuple(
        Replica(
            num_microbatches=num,
            microbatch_size=_SIZE,
            stages=(_stage(i, (0, _LAYERS), 1),),
        )
        for i, num in enumerate(shared_out(_BATCH // _SIZE, percents))
    )
    ends = [0]
    for num in shared_out(_LAYERS, percents):
        ends.append(ends[-1] + num)
    by_layers = tuple(
        _stage(i, (ends[i], ends[i + 1]), len(percents) - i)
        for i in range(len(percents))
    )
    pipeline = Replica(
        num_microbatches=_BATCH // _SIZE, microbatch_size=_SIZE, stages=by_layers
    )
    return {"samples": _plan(*by_samples), "layers": _plan(pipeline)}


def _stage(host: int, layers: tuple[int, int], ahead: int) -> Stage:
    return Stage(node=f"host-{host}", devices=(0,), layers=layers, launch_ahead=ahead)


def _plan(*replicas: Replica) -> Plan:
    return Plan(model=_MODEL, seq_len=_SEQ_LEN, global_batch=_BATCH, replicas=replicas)


def of_mix(
    folder: Path, percents: Sequence[float], with_profile: bool
) -> dict[str, Any]:
    """Run both plans, and predict each from either run, with a profile if requested."""
    cluster, found = cluster_of(percents), plans(percents)
    names = [node.name for node in cluster.nodes]
    measured: dict[str, list[float]] = {}
    profile: Path | None = None
    with hosts(dict(zip(names, percents, strict=True))) as on:
        if with_profile:
            profile = folder / "profile.json"
            length = ("--seq-len", str(_SEQ_LEN))
            layers = profiled(on, cluster, _MODEL, [_SIZE], folder, *length)
            write_profile(profile, layers)
        for name, plan in found.items():
            if profile is not None:
                (folder / name / "run").mkdir(parents=True)
                shutil.copy(profile, folder / name / "run" / PROFILE)
            times_s = _train(folder / name, cluster, plan, on)
            measured[name] = times_s[_LEARNT:]

    def predicted(name: str, learnt_from: str | None) -> SimulatedStep:
        file = learnt_from and folder / learnt_from / "run" / "calibration.json"
        return hetjax.simulate_plan(
            found[name],
            model=_MODEL,
            cluster=cluster,
            dtype="float32",
            profile=profile,
            calibration=file or "none",
            quiet=True,
        )

    rows: dict[str, Any] = {}
    for name, other in (("samples", "layers"), ("layers", "samples")):
        step_s, later_s = median(measured[name]), measured[name]
        halves = median(later_s[::2]), median(later_s[1::2])
        by_other = predicted(name, other)
        rows[name] = {
            "plan": str(found[name]).splitlines(),
            "measured_s": step_s,
            "noise": abs(halves[0] / halves[1] - 1),
            "without": predicted(name, None).step_time_s / step_s,
            "own": predicted(name, name).step_time_s / step_s,
            "other": by_other.step_time_s / step_s,
            "other_in_interval": _holds(by_other, step_s),
        }
    return {"percents": list(percents), **rows}


def _holds(step: SimulatedStep, measured_s: float) -> bool:
    assert step.certainty is not None
    return measured_s in step.certainty.interval


def _train(folder: Path, cluster: Cluster, plan: Plan, on: Hosts) -> list[float]:
    options = ("--simulate", "--watch-speeds", "on", "--calibration", "none")
    counted = partial(StepComparison, is_simulated=False)

    def comparison(*, is_simulated: bool, **given: Any) -> StepComparison:
        assert is_simulated
        return counted(**given)

    with patch.object(open_run, "StepComparison", comparison):
        return run(folder, cluster, plan, on, *options, steps=_STEPS)


def measure(
    mixes: Sequence[Sequence[float]], with_profile: bool
) -> Iterator[dict[str, Any]]:
    """Yield the result so far after each mix."""
    rows: list[dict[str, Any]] = []
    for percents in mixes:
        with TemporaryDirectory() as folder:
            rows.append(of_mix(Path(folder), percents, with_profile))
        yield {
            "command": " ".join([_COMMAND, *["--profile"] * with_profile]),
            "machine": machine(),
            **summary(rows),
            "mixes": rows,
        }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of both plans of all mixes."""
    each = [row[name] for row in rows for name in plans([1])]
    errors = {
        which: [abs(one[which] - 1) for one in each]
        for which in ("without", "own", "other")
    }
    return {
        "median_error": {which: median(found) for which, found in errors.items()},
        "largest_error": {which: max(found) for which, found in errors.items()},
        "median_noise": median(one["noise"] for one in each),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mixes", type=int, default=len(MIXES))
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for found in measure(MIXES[: given.mixes], given.profile):
        print(json.dumps(found["mixes"][-1]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1 if given.json else None))


if __name__ == "__main__":
    main()
