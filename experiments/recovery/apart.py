# SPDX-License-Identifier: Apache-2.0
"""Kills each part of a run that shares no directory, and compares the losses.

    python -m experiments.recovery.apart [--kills 20] [--seed 0] [--steps 300]
        [--folder runs/apart] [--keep copies|store|ceph] [--launcher ssh|ray|join]

Trains preset `tiny` on two machines: by `ssh` (a stand-in that runs its command here),
on a real Ray (`experiments/launchers/own_ray.py`), or as machines that join
(`experiments/launchers/joining_machines.py`). Each machine is a mount namespace
in which the controller's run directory, text, cache and weights are hidden
(`tests/launchers/apart.py`). At random moments the experiment kills one of these,
whatever the run is doing:

    worker      the worker process of a machine
    machine     all processes of a machine, and its disk; it then joins again
    client      what has started a worker: `ssh` here, `hetjax worker` on the machine
    controller  the run itself; the same command starts it again
    all         everything at once except disks and Ray's head; the same command
                starts it again

With `--keep copies` both machines hold parts of checkpoints (the default of such a
run). With `--keep store` a folder that all see acts as the store; with `--keep ceph` it
is a bucket of a real server (`experiments/stores/own_ceph.py`), whose login is in the
home of each machine. All losses must equal those of an uninterrupted run on machines
that share everything, to 1e-5. Prints a line for each kill, and one JSON object.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from experiments.launchers.joining_machines import JoiningMachines, joining_machines
from experiments.launchers.own_ray import OwnRay, own_ray
from experiments.stores.own_ceph import BUCKET, URL, own_ceph, write_profile
from hetjax.checkpoint.storage import open_store
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import named_config
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import EVENTS, METRICS
from tests.launchers import fake_programs
from tests.launchers.apart import Machines, switch_off
from tests.launchers.fake_programs import processes
from tests.training.pair import ONE_REPLICA, TWO_NODES

PLACES = ("worker", "machine", "controller", "all")
HOSTS = {"left": "127.0.0.2", "right": "127.0.0.3"}
OWN, PORT = Path("own/run"), 17411  # the run's directory; where machines join it
Fleet = OwnRay | JoiningMachines
_WORKER, _PAUSE_S, _LONGEST_S = "hetjax.training.worker", (0.0, 4.0), 900.0
_TRAINS_AGAIN = 0.97  # chance, each half second, to go on waiting for a new step


class _Store(NamedTuple):
    url: str
    endpoint: str | None


class Site:
    """The folders and programs of one experiment."""

    def __init__(
        self, folder: Path, steps: int, store: _Store | None, fleet: Fleet | None
    ) -> None:
        self.folder, self.store, self.fleet, self._steps = folder, store, fleet, steps
        self.run_dir = folder / OWN
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.programs = fake_programs.written(folder)
        if store and store.endpoint:
            write_profile(folder / "home")
        self.weights, self.text = folder / "weights", folder / "text.txt"
        self.text.write_text((Path(__file__).parents[2] / "LICENSE").read_text())
        rng, config = np.random.default_rng(0), named_config("tiny")
        self.weights.mkdir()
        write_model(
            self.weights,
            config,
            fields_of(config),
            lambda _, shape: rng.normal(0, 0.05, shape).astype(np.float32),
            "float32",
        )
        (folder / "pair.toml").write_text(TWO_NODES)
        write_plan(folder / "plan.json", ONE_REPLICA)  # each half has one holder
        hosts = (f'[[host]]\nname = "{n}"\naddress = "{a}"\n' for n, a in HOSTS.items())
        (folder / "hosts.toml").write_text("".join(hosts))
        self.machines = Machines(
            folder=folder / "machines",
            run_dir=self.run_dir.parent,
            cache=folder / "cache",
            hidden=(self.text, self.weights),
        )
        (self.programs / "ssh.apart").write_text(str(self.machines.program))
        for address in HOSTS.values():
            self.switch_on(address)

    def switch_on(self, address: str) -> None:
        """Let the machine join; `ssh` reaches every machine that is on."""
        if self.fleet:
            self.fleet.join(self.machines, address)

    def command(self, run_dir: Path, *launcher: str) -> list[str]:
        words = [sys.executable, "-m", "hetjax.train", "tiny", "--simulate", *launcher]
        words += ["--run-dir", str(run_dir), "--cluster", f"{self.folder}/pair.toml"]
        words += ["--steps", str(self._steps), "--init", str(self.weights)]
        words += ["--data.path", str(self.text)]
        words += ["--data.cache-dir", f"{self.folder}/cache"]
        words += ["--global-batch", "8", "--seq-len", "16", "--checkpoint.every", "10"]
        words += ["--evaluation.num-batches", "1", "--evaluation.sample-tokens", "0"]
        words += ["--plan", f"{self.folder}/plan.json"]
        return [*words, "--standby-plans-after-s", "0"]

    def start(self, run_dir: Path, *launcher: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        own = {"PATH": path, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        if isinstance(self.fleet, OwnRay):
            own["RAY_ADDRESS"] = self.fleet.address
        if self.store and self.store.endpoint:
            own["HOME"] = str(self.folder / "home")  # all that ssh passes on
        with (self.folder / f"{run_dir.name}.said").open("ab") as said:
            return subprocess.Popen(
                self.command(run_dir, *launcher),
                stdout=said,
                stderr=said,
                env=os.environ | own,
            )

    def start_apart(self) -> subprocess.Popen[bytes]:
        kept: list[str] = []
        if self.store:
            kept += ["--checkpoint.cloud", self.store.url]
        if self.store and self.store.endpoint:
            kept += ["--checkpoint.endpoint", self.store.endpoint]
        by = ["ssh", "--hosts", f"{self.folder}/hosts.toml"]
        if isinstance(self.fleet, OwnRay):
            by = ["ray"]
        elif self.fleet:
            by = ["join", "--join.address", f"127.0.0.1:{PORT}"]
        return self.start(self.run_dir, "--launcher", *by, *kept)

    def workers(self, address: str) -> list[int]:
        if self.fleet:
            return self.fleet.workers(address)
        told = f"SSH_CONNECTION=127.0.0.1 9 {address}"
        return processes([_WORKER], told, str(self.programs))

    def clients(self, address: str) -> list[int]:
        """Return what has started the worker there, unless Ray has."""
        if isinstance(self.fleet, JoiningMachines):
            found = self.fleet.client(address)
            return [] if found is None else [found]
        return processes([str(self.programs / "ssh"), address])


def kill(site: Site, run: subprocess.Popen[bytes], place: str, address: str) -> bool:
    """Kill in this place; return whether there was a process to kill."""
    if place in ("worker", "client"):
        there = (site.workers if place == "worker" else site.clients)(address)
        return [_killed(pid) for pid in there].count(True) > 0
    if place == "machine":
        with site.machines.off(address):
            found = switched_off(site, address)
            if found:
                site.machines.lose_disk(address)
        site.switch_on(address)
        return found
    if place == "all":
        run.kill()
        run.wait()
        for each in HOSTS.values():
            switched_off(site, each)
            site.switch_on(each)
        return True
    run.kill()
    run.wait()
    return True


def switched_off(site: Site, address: str) -> bool:
    """Kill everything on the machine; return whether there was anything."""
    if site.fleet:
        site.fleet.switch_off(address)
        return True
    found = site.workers(address)
    for pid in found:
        with suppress(FileNotFoundError):  # it has ended meanwhile
            switch_off(pid)
    return bool(found)


def _killed(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def may_lose_a_disk(site: Site) -> bool:
    """Whether the run survives a lost disk: the other or the store has a checkpoint.

    A run that loses a second disk before its next checkpoint is lost, as the manual
    says.
    """
    if site.store:
        url, endpoint = site.store
        names = open_store(url, is_tried=False, endpoint=endpoint).names("")
        return any(name.endswith("/COMMIT") for name in names)
    saved = [site.machines.saved(address) for address in HOSTS.values()]
    return bool(saved[0]) and saved[0][-2:] == saved[1][-2:]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = read_journal(run_dir / METRICS)
    return [(x["step"], x["loss"] if "loss" in x else x["val_loss"]) for x in lines]


def reached(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl, whose last line may be incomplete."""
    with suppress(OSError, ValueError, KeyError):
        return max((step for step, _ in losses(run_dir)), default=0)
    return 0


def unlike(found: Sequence[tuple[int, float]], whole: Sequence[tuple[int, float]]):
    """Return the first step at which the two differ by more than rounding, or None.

    Returns "their length" if only that differs.
    """
    for one, other in zip(found, whole, strict=False):
        if one[0] != other[0] or not isclose(one[1], other[1], rel_tol=1e-5):
            return one[0]
    return None if len(found) == len(whole) else "their length"


def main() -> None:
    parser = argparse.ArgumentParser(description="A run killed in every place.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("runs/apart"))
    parser.add_argument("--keep", choices=("copies", "store", "ceph"), default="copies")
    parser.add_argument("--launcher", choices=("ssh", "ray", "join"), default="ssh")
    asked = parser.parse_args()
    with ExitStack() as stack:
        if asked.keep == "ceph":
            folder = Path(stack.enter_context(TemporaryDirectory()))
            stack.enter_context(own_ceph(folder))
        fleet: Fleet | None = None
        if asked.launcher == "ray":
            fleet = stack.enter_context(own_ray(HOSTS))
        elif asked.launcher == "join":
            run_dir = asked.folder.absolute() / OWN
            fleet = stack.enter_context(joining_machines(HOSTS, run_dir))
        sys.exit(_all_runs(asked, fleet))


def _all_runs(asked: argparse.Namespace, fleet: Fleet | None) -> bool:
    """Run until enough kills were made; return whether a run went wrong."""
    chance, kills, runs = random.Random(asked.seed), Counter[str](), 0
    wrong: list[str] = []
    whole: list[tuple[int, float]] = []
    folder = asked.folder.absolute()
    while kills.total() < asked.kills:
        store = {
            "copies": None,
            "store": _Store((folder / "store").as_uri(), None),
            "ceph": _Store(f"s3://{BUCKET}/run-{runs}", URL),
        }[asked.keep]
        site = Site(folder, asked.steps, store, fleet)
        if not whole:
            alone = site.start(site.folder / "whole", "--launcher", "processes")
            assert alone.wait() == 0, "the run without kills"
            whole = losses(site.folder / "whole")
        most = min(asked.kills - kills.total(), 4)
        runs, code = runs + 1, _one_run(site, chance, most, kills)
        if code:
            wrong.append(f"run {runs} ended with {code}")
        elif (at := unlike(losses(site.run_dir), whole)) is not None:
            wrong.append(f"run {runs}: losses differ at {at}")
        told = Counter(line["event"] for line in read_journal(site.run_dir / EVENTS))
        print(f"run {runs}: code {code}, {dict(told)}", flush=True)
        if wrong:
            break
        for address in HOSTS.values() if fleet else ():
            switched_off(site, address)
    print(json.dumps({"kills": kills, "runs": runs, "wrong": wrong}))
    return bool(wrong)


def _one_run(site: Site, chance: random.Random, most: int, kills: Counter[str]) -> int:
    run, end_s = site.start_apart(), time.monotonic() + _LONGEST_S
    done = 0
    while run.poll() is None and time.monotonic() < end_s:
        at = reached(site.run_dir)  # mostly trains again before a kill
        while run.poll() is None and chance.random() < _TRAINS_AGAIN:
            if reached(site.run_dir) > at:
                break
            time.sleep(0.5)
        next_s = time.monotonic() + chance.uniform(*_PAUSE_S)
        while run.poll() is None and time.monotonic() < next_s:
            time.sleep(0.05)
        if done == most or run.poll() is not None:
            continue
        has_clients = not isinstance(site.fleet, OwnRay)
        places = (*PLACES, "client") if has_clients else PLACES
        place, (name, address) = chance.choice(places), chance.choice([*HOSTS.items()])
        if place == "machine" and not may_lose_a_disk(site):
            place = "worker"
        if not kill(site, run, place, address):
            continue
        done += 1
        kills[place] += 1
        told = f"killed: {place} ({name}) at step {reached(site.run_dir)}"
        print(told, flush=True)
        if place in ("controller", "all"):
            run = site.start_apart()
    if run.poll() is None:
        run.kill()
    return run.wait()


if __name__ == "__main__":
    main()
