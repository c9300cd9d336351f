# SPDX-License-Identifier: Apache-2.0
"""Measures how long a run stands still: local-first recovery against cloud-only.

    python -m experiments.recovery.speed [--scenario NAME ...] [--peer-mbit 1000]
        [--model gpt-12x768] [--only local-first] [--reroute]

Sets up hosts as a testbed (`experiments/testbed`: namespaces with shaped links; needs
root) and one more host for the cloud, whose link has a fifth of the rate. Each scenario
(`scenarios.py`) runs twice, by `--recovery local-first` and by `cloud-only`, on new
workers with their own disks. A run takes three steps, saves a checkpoint of about 1 GB,
copies it to the cloud, and takes one more step. By then the plan for one node less is
compiled, as it would be after a minute of any run. Then the scenario's change happens
in the middle of a step.

Times count from the change to the end of the first step after it. `floor_s` is the time
of the busiest link for its data, at its rate; `stood_s` is the time lost in addition to
`floor_s` and the step itself. With `--reroute` the remaining replicas first repeat the
interrupted step: `rerouted` has the time until its end, the seconds of the rerouting,
and the number of steps without the lost worker. The other times then count from the
moment when all stand still. Prints one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from experiments.islands import models
from experiments.recovery.scenarios import (
    BATCH,
    NODES,
    SEQ_LEN,
    Scenario,
    scenarios,
)
from experiments.recovery.trial import Recovery, Site, Trial
from experiments.testbed.hosts import Host, Testbed
from hetjax.models.model import parameter_count
from hetjax.models.presets import model_preset
from hetjax.training.settings.config import RunConfig

MODELS = "gpt-12x768", "gpt-12x256"
_CLOUD = "cloud"  # the host that serves it
_CLOUD_SHARE = 5  # the cloud's link has a peer's rate divided by this
_STATE_BYTES = 12  # per parameter


@contextmanager
def cloud(testbed: Testbed) -> Iterator[str]:
    """Yield the URL of a cloud on its own host."""
    words = [sys.executable, "-m", "experiments.recovery.cloud_host"]
    with subprocess.Popen(
        [*testbed.prefix(_CLOUD), *words, testbed.address(_CLOUD)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def floor_s(site: Site, scenario: Scenario, recovery: Recovery) -> float:
    """Return the seconds that the busiest link takes for the data that must move."""
    sizes = [
        _STATE_BYTES * parameter_count(layer)
        for layer in model_preset(scenario.after.model).layers
    ]
    if recovery == "cloud-only":
        from_cloud = sum(
            sum(sizes[slice(*stage.layers)]) for _, _, stage in scenario.after.stages()
        )
    else:
        from_cloud = sum(sizes[layer] for layer in scenario.from_cloud)
    from_peer = max(
        (sum(sizes[n] for n in layers) for _, layers in scenario.from_peers),
        default=0,
    )
    if recovery == "cloud-only":
        from_peer = 0
    cloud_s = from_cloud / (site.peer_bytes_per_s / _CLOUD_SHARE)
    return max(cloud_s, from_peer / site.peer_bytes_per_s)


def tried(
    site: Site, scenario: Scenario, recovery: Recovery, reroutes: bool = False
) -> dict[str, Any]:
    """Run one scenario with one kind of recovery."""
    with ExitStack() as stack:
        trial = Trial(site, scenario, recovery, stack, reroutes)
        step_s = trial.prepare()
        found = trial.strike()
    floor = floor_s(site, scenario, recovery)
    stood_s = found["total_s"] - floor - found["later_step_s"]
    return found | {"floor_s": floor, "step_s": step_s, "stood_s": stood_s}


def compared(
    site: Site, scenario: Scenario, only: Recovery | None, reroutes: bool
) -> dict[str, Any]:
    if only is not None:
        return {
            "title": scenario.title,
            only: tried(site, scenario, only, reroutes),
        }
    ours = tried(site, scenario, "local-first", reroutes)
    theirs = tried(site, scenario, "cloud-only")
    fixed_s = ours["total_s"] - ours["move_s"]
    return {
        "title": scenario.title,
        "local-first": ours,
        "cloud-only": theirs,
        "replica_survives": scenario.replica_survives,
        "times_faster": theirs["total_s"] / ours["total_s"],
        "over_floor": ours["total_s"] / (ours["floor_s"] + fixed_s),
    }


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    every = scenarios(given.model)
    mbit = given.peer_mbit
    hosts = [Host(name=name, egress_mbit_per_s=mbit) for name in NODES]
    hosts.append(Host(name=_CLOUD, egress_mbit_per_s=mbit / _CLOUD_SHARE))
    model = model_preset(given.model)
    dataset = models.own_sources(folder, model.vocab_size)
    config = RunConfig(
        model=given.model,
        run_dir=folder,
        steps=100,
        seq_len=SEQ_LEN,
        global_batch=BATCH,
        dtype="float32",
        simulate=True,
    )
    with Testbed(hosts) as testbed, cloud(testbed) as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        site = Site(
            testbed=testbed,
            config=config,
            dataset=dataset,
            folder=folder,
            peer_bytes_per_s=mbit * 1e6 / 8,
        )
        found = {}
        for name in given.scenario or every:
            print(f"{name} ...", file=sys.stderr, flush=True)
            found[name] = compared(site, every[name], given.only, given.reroute)
            print(json.dumps(found[name]), file=sys.stderr, flush=True)
    return {
        "model": given.model,
        "state_bytes": _STATE_BYTES * sum(map(parameter_count, model.layers)),
        "peer_mbit_per_s": mbit,
        "cloud_mbit_per_s": mbit / _CLOUD_SHARE,
        "scenarios": found,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.recovery.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", action="append", choices=[*scenarios(MODELS[0])])
    parser.add_argument("--peer-mbit", type=float, default=1000.0)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--only", choices=["local-first", "cloud-only"])
    parser.add_argument("--reroute", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(given, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
