# SPDX-License-Identifier: Apache-2.0
"""Halves a host's speed in mid-run: does the run notice it, move, and gain?

    python -m experiments.stragglers.moving [--json] [--percent 40]

Two workers of `tiny` each run in a control group with `--percent` of a core, as root.
From step THROTTLED on, one group has half of that. The run, with `--replan auto`, names
the slow host, weighs another plan and moves to it. `after_s` is the median step after
the move. `best_s` is that of a second run, which is throttled from its start and uses
the plan of the full search for such a cluster; `of_best` is `best_s` / `after_s`.
`usual_s` is the median step before the throttle, `slow_s` that between throttle and
move. Each host is throttled once. After the move the two runs train in turns, a few
steps each: they share the machine, whose speed changes within minutes.
"""

import argparse
import json
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from experiments.machine import machine
from experiments.testbed.placed_runs import Hosts, events, hosts, run
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.slowness.known import slowness
from hetjax.models.named import TypedName, load_named
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import Plan, Replica, Stage

THROTTLED, _STEPS, _COLD = 26, 80, 4
_TURNS, _TURN = 6, 5  # turns of each run, and the steps of a turn
_MODEL, _SEQ_LEN, _BATCH = "tiny", 128, 48
_HOSTS = ("left", "right")


def cluster() -> Cluster:
    nodes = tuple(Node(name=host, device="cpu", count=1) for host in _HOSTS)
    return Cluster(name="two-hosts", nodes=nodes)


def halves() -> Plan:
    """Return the best plan for equal hosts: each has half of the samples."""
    layers = len(load_named(TypedName(_MODEL)).layers)
    replicas = tuple(
        Replica(
            num_microbatches=_BATCH // 2 // 4,
            microbatch_size=4,
            stages=(Stage(node=h, devices=(0,), layers=(0, layers), launch_ahead=1),),
        )
        for h in _HOSTS
    )
    return Plan(model=_MODEL, seq_len=_SEQ_LEN, global_batch=_BATCH, replicas=replicas)


def best_with(slow: str) -> Plan:
    """Return the full search's plan for the cluster with a host known to be slow."""
    request = PlanRequest(
        model=load_named(TypedName(_MODEL)),
        cluster=slowness({slow: 2.0}, {}).applied(cluster()),
        seq_len=_SEQ_LEN,
        global_batch=_BATCH,
    )
    return find_plan(request, local_work=0).best.plan


def begins_turn(step: int) -> bool:
    """Return whether a turn begins with this step, counted from 1 after the cold start
    of a plan."""
    return step > _COLD and (step - _COLD) % _TURN == 1


def in_turns(times_s: Sequence[float]) -> list[float]:
    """Return the times of the steps in turns, but for the first of each turn: these
    include waiting for the other run."""
    steps = enumerate(times_s[: _COLD + _TURNS * _TURN], start=1)
    return [took_s for n, took_s in steps if n > _COLD and not begins_turn(n)]


class Best:
    """The run with the best plan: a process that trains a turn when it is asked to."""

    def __init__(self, folder: Path, plan: Plan, on: Hosts) -> None:
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        given = theirs, folder, plan, on
        self._process = context.Process(target=_train_in_turns, args=given, daemon=True)
        self._num_turns = 0

    def train(self) -> None:
        """Train the next turn, the first after the cold steps; none after the last."""
        if self._num_turns == _TURNS:
            return
        if self._num_turns == 0:
            self._process.start()
            self._ours.recv()
        self._num_turns += 1
        self._ours.send("train")
        self._ours.recv()

    def times_s(self) -> list[float]:
        """Return the step times of all turns; none unless all are over."""
        if self._num_turns < _TURNS:
            return []
        self._ours.send("end")
        times_s = self._ours.recv()
        self._process.join()
        return in_turns(times_s)


def _train_in_turns(asked: Connection, folder: Path, plan: Plan, on: Hosts) -> None:
    def wait(step: int) -> None:
        if begins_turn(step):
            asked.send("ready")
            asked.recv()

    steps = _COLD + _TURNS * _TURN
    times_s = run(folder, cluster(), plan, on, "--no-simulate", steps=steps, at=wait)
    asked.send("ready")
    asked.recv()
    asked.send(times_s)


def of_host(folder: Path, slow: str, on: Hosts) -> dict[str, Any]:
    """Run the run that moves, and the one that need not; return both results."""
    moving, plan = folder / f"moving-{slow}", best_with(slow)
    best = Best(folder / f"best-{slow}", plan, on)

    def before(step: int) -> None:
        if step == THROTTLED:
            on.allow(slow, 0.5)
        moved = events(moving, "recovered") if step > THROTTLED else []
        if moved and begins_turn(step - moved[0]["step"]):
            best.train()

    moves = ("--no-simulate", "--replan", "auto")
    times_s = run(moving, cluster(), halves(), on, *moves, steps=_STEPS, at=before)
    best_s = best.times_s()
    named = [e for e in events(moving, "slow") if e["who"] == slow]
    weighed, moved = events(moving, "weighed"), events(moving, "moved")
    recovered = events(moving, "recovered")
    at = recovered[0]["step"] if recovered else len(times_s)
    on.allow(slow, 1.0)
    after = in_turns(times_s[at:])
    found = {
        "named_after_steps": named[0]["step"] - THROTTLED + 1 if named else None,
        "factor": named[0]["factor"] if named else None,
        "weighed_at": weighed[0]["step"] if weighed else None,
        "moved_at": at if recovered else None,
        "moves": len(recovered),
        "pause_s": moved[0]["pause_s"] if moved else None,
        "predicted_pause_s": moved[0]["predicted_pause_s"] if moved else None,
        "gain": moved[0]["gain"] if moved else None,
        "predicted_gain": weighed[0]["gain"] if weighed else None,
        "usual_s": median(times_s[_COLD : THROTTLED - 1]),
        "slow_s": median(times_s[THROTTLED - 1 : at]),
        "after_s": median(after) if after else None,
        "best_s": median(best_s) if best_s else None,
        "plan": shown(plan),
        "moved_to": shown_json(weighed[0]["to"]) if weighed else None,
    }
    if after and best_s:
        found["of_best"] = found["best_s"] / found["after_s"]
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


def shown(plan: Plan) -> str:
    return " + ".join(
        f"{r.num_microbatches}x{r.microbatch_size} on "
        + " > ".join(f"{s.node} {s.layers[0]}..{s.layers[1] - 1}" for s in r.stages)
        for r in plan.replicas
    )


def shown_json(plan: dict[str, Any]) -> str:
    return " + ".join(
        f"{r['num_microbatches']}x{r['microbatch_size']} on "
        + " > ".join(
            f"{s['node']} {s['layers'][0]}..{s['layers'][1] - 1}" for s in r["stages"]
        )
        for r in plan["replicas"]
    )


def study(percent: float, slow: Sequence[str]) -> dict[str, Any]:
    """Return the result, as JSON values."""
    with TemporaryDirectory() as folder, hosts(dict.fromkeys(_HOSTS, percent)) as on:
        found = {host: of_host(Path(folder), host, on) for host in slow}
    return {
        "command": "python -m experiments.stragglers.moving --json",
        "machine": machine(),
        "percent_of_a_core": percent,
        "tokens_per_step": _SEQ_LEN * _BATCH,
        "throttled_from_step": THROTTLED,
        "hosts": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--percent", type=float, default=40.0)
    parser.add_argument("--slow", nargs="+", choices=_HOSTS, default=_HOSTS)
    given = parser.parse_args()
    result = study(given.percent, given.slow)
    print(json.dumps(result, indent=1 if given.json else None))


if __name__ == "__main__":
    main()
