# SPDX-License-Identifier: Apache-2.0
"""Measures what hetjax gains: unlike hosts of this machine train one model.

    python -m experiments.testbed.demo [--runs 5] [--output demo.json] [--plot demo.png]

Sets up hosts of unlike speed behind links of unlike rates (CPU quotas, namespaces and
shaped links of `experiments/testbed`; needs root and two idle cores). Trains in turn
with the plan of hetjax, with an even split over all hosts (`--planner even`), and with
the hosts of each kind alone, for which hetjax plans, too. Each run measures the layers
under the quotas, plans with these times, compiles before the quotas hold, and times
steps in rounds that alternate. Prints one JSON object: medians over the runs, measured
and predicted; draws a picture of it on request.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.islands import models
from experiments.islands.unequal import (
    Running,
    cluster_of,
    profiled,
    request_of,
)
from experiments.testbed.hosts import Host, Testbed
from hetjax.cluster.cluster import Cluster
from hetjax.models.model import tensor_sizes
from hetjax.models.presets import model_preset
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.even import even_plan
from hetjax.report.pictures.picture import Picture, new_figure, titled_axes
from hetjax.schedule.predicted import Predicted

HOSTS = (
    Host(name="fast", cpu_percent=60.0, egress_mbit_per_s=1000.0),
    Host(name="slow-0", cpu_percent=20.0, egress_mbit_per_s=300.0),
    Host(name="slow-1", cpu_percent=20.0, egress_mbit_per_s=300.0),
)
MODEL, GLOBAL_BATCH, SIZES = "gpt-8x256", 64, (2, 4)
OURS, EVEN = "hetjax", "even split"
_COLOURS = {True: "#0072b2", False: "#c8c8c8"}  # ours, others


def contestants(request: PlanRequest) -> dict[str, Predicted]:
    """Return the plans that are compared, by name."""
    found = {OURS: _planned(request), EVEN: _even(request)}
    kinds = dict.fromkeys(node.device for node in request.cluster.nodes)
    for kind in kinds:
        nodes = tuple(n for n in request.cluster.nodes if n.device == kind)
        names = " and ".join(node.name for node in nodes)
        alone = replace(request.cluster, nodes=nodes)
        found[f"{names} alone"] = _planned(replace(request, cluster=alone))
    return found


def _planned(request: PlanRequest) -> Predicted:
    return find_plan(request).best


def _even(request: PlanRequest) -> Predicted:
    plan = even_plan(
        request.cluster,
        model=request.model.name,
        num_layers=len(request.model.layers),
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        microbatch_size=max(request.microbatch_sizes),
        tensor_sizes=tensor_sizes(request.model),
    )
    return evaluate_plan(request, plan)


def run(hosts: Sequence[Host], num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure layers, plan, and time all plans in turn; return what each reached."""
    config = models.preset(MODEL).config
    with (
        tempfile.TemporaryDirectory() as name,
        Testbed(hosts) as testbed,
        ExitStack() as ends,
    ):
        folder = Path(name)
        dataset = models.own_sources(folder, model_preset(MODEL).vocab_size)
        cluster: Cluster = cluster_of(hosts)
        profile = profiled(testbed, cluster, MODEL, SIZES, folder)
        request = request_of(MODEL, cluster, profile, GLOBAL_BATCH, SIZES)
        found = contestants(request)
        running: dict[str, Running] = {}
        for name, predicted in found.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            own = folder / name.replace(" ", "-")
            place = testbed, config, cluster, dataset, own, ends
            running[name] = Running(predicted.plan, *place)
        for layout in running.values():
            layout.run(1, counts=False)
        for _ in range(num_rounds):
            for layout in running.values():
                layout.run(num_steps, counts=True)
        for layout in running.values():
            layout.end()
    return {
        name: {
            "tokens_per_s": request.seq_len * GLOBAL_BATCH / median(layout.step_s),
            "predicted_tokens_per_s": found[name].tokens_per_s,
            "plan": str(found[name].plan).splitlines(),
        }
        for name, layout in running.items()
    }


def summary(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return medians over runs, and the median speedup of hetjax within a run."""
    keys = "tokens_per_s", "predicted_tokens_per_s"
    names = list(runs[0])
    return {
        "contestants": {
            name: {key: median(run[name][key] for run in runs) for key in keys}
            | {"plan": runs[-1][name]["plan"]}
            for name in names
        },
        "faster": {
            name: median(run[OURS][keys[0]] / run[name][keys[0]] for run in runs)
            for name in names
            if name != OURS
        },
    }


def draw(found: Mapping[str, Any]) -> Picture:
    """Draw tokens per second: bars are measured, ticks are predicted."""
    rows = sorted(found["contestants"].items(), key=_speed, reverse=True)
    figure = new_figure(1.0 + 0.42 * len(rows))
    axes = titled_axes(figure, f"{found['model']} on {'; '.join(found['hosts'])}")
    for y, (name, row) in enumerate(rows):
        measured, predicted = row["tokens_per_s"], row["predicted_tokens_per_s"]
        axes.barh(y, measured, height=0.62, color=_COLOURS[name == OURS])
        axes.plot([predicted] * 2, [y - 0.36, y + 0.36], color="black", linewidth=1.5)
        told = f"  {measured:,.0f}"
        if name != OURS:
            told += f"; hetjax is {found['faster'][name]:.2f} times as fast"
        axes.text(max(measured, predicted), y, told, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, measured; the tick is what was predicted")
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return Picture(figure)


def _speed(named: tuple[str, Mapping[str, Any]]) -> float:
    return named[1]["tokens_per_s"]


def measure(num_runs: int, num_rounds: int, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the result so far after each run."""
    hosts = [
        f"{h.name}: {h.cpu_percent:g} % of a core, {h.egress_mbit_per_s:g} Mbit/s"
        for h in HOSTS
    ]
    runs: list[dict[str, Any]] = []
    for _ in range(num_runs):
        runs.append(run(HOSTS, num_rounds, num_steps))
        load = os.getloadavg()[0]
        found = {"hosts": hosts, "model": MODEL, "global_batch": GLOBAL_BATCH}
        yield found | {"load": load} | summary(runs) | {"runs": runs}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of a run")
    parser.add_argument("--steps", type=int, default=1, help="of a round")
    parser.add_argument("--output", type=Path, help="the JSON, written after each run")
    parser.add_argument("--plot", type=Path, help="picture, drawn after each run")
    parser.add_argument("--result", type=Path, help="draw this; measure nothing")
    given = parser.parse_args(arguments)
    if given.result and not given.plot:
        parser.error("--result draws a picture: add --plot demo.svg, say")
    if given.result:
        found = json.loads(given.result.read_text())
        draw(found).save(given.plot)
        return
    os.environ["PJRT_NPROC"] = "1"  # threads of a host would contend
    text = ""
    for found in measure(given.runs, given.rounds, given.steps):
        text = json.dumps(found, indent=1)
        if given.output:
            given.output.write_text(text + "\n")
        if given.plot:
            draw(found).save(given.plot)
    print(text)


if __name__ == "__main__":
    main()
