# SPDX-License-Identifier: Apache-2.0
"""Splits gaps in two: how far the plan, and how far the bound, is from the best plan.

    python -m experiments.planner.likeness [--cases two-zones university]

The best plans of the clusters in `cases.py` are unknown: too many exist to try all. So
here each cluster shrinks to four devices of the same kinds, and its model to four
blocks of the same width. A link between zones shrinks with the devices, so that
messages and sums weigh about as much. All plans of such a likeness are tried (those of
whole backward passes and one part per device: the space "whole" of the planner). Prints
a JSON object per likeness: the least step of all plans, and as shares of it how far the
planner's plan is above it, and its bound below.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.models.decoders import model_of
from hetjax.models.presets import model_config
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from tests.planner.whole_space import all_plans, fastest_s

_NUM_BLOCKS, _BATCH = 4, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """`nodes` are (device, count, zone); `trunk_gbit_per_s` joins the two zones."""

    nodes: tuple[tuple[str, int, str], ...]
    model: str
    seq_len: int
    trunk_gbit_per_s: float | None = None
    latency_ms: float = 1.0

    def request(self) -> PlanRequest:
        nodes = tuple(
            Node(name=f"n{n}", device=device, count=count, zone=zone)
            for n, (device, count, zone) in enumerate(self.nodes)
        )
        links: tuple[Link, ...] = ()
        if self.trunk_gbit_per_s is not None:
            one, other = sorted({node.zone for node in nodes})
            between = Link(
                between=(one, other),
                bandwidth_gbit_per_s=self.trunk_gbit_per_s,
                latency_ms=self.latency_ms,
            )
            links = (between,)
        config = replace(model_config(self.model), num_blocks=_NUM_BLOCKS)
        return PlanRequest(
            model=model_of(config),
            cluster=Cluster(name="likeness", nodes=nodes, links=links),
            seq_len=self.seq_len,
            global_batch=_BATCH,
            microbatch_sizes=(1, 2),
            tensor_degrees=(1, 2),
            data_degrees=(1,),
            remats=("none",),
        )


_A100, _A100_80 = "A100-SXM4-40GB", "A100-SXM4-80GB"
_TWO_ZONES = Likeness(
    nodes=((_A100_80, 2, "east"), (_A100_80, 2, "west")),
    model="llama3-8b",
    seq_len=2048,
    trunk_gbit_per_s=5 * 4 / 8,
)
LIKENESSES = {
    "university": Likeness(
        nodes=(
            (_A100, 2, "hall"),
            ("V100-PCIE-32GB", 1, "hall"),
            ("RTX-6000-Ada-Generation", 1, "annex"),
        ),
        model="llama2-7b",
        seq_len=4096,
        trunk_gbit_per_s=10 * 4 / 72,
        latency_ms=0.3,
    ),
    "two-clusters": Likeness(
        nodes=(("V100-SXM2-32GB", 2, "x"), (_A100, 2, "y")),
        model="gpt3-2.6b",
        seq_len=1024,
        trunk_gbit_per_s=5 * 4 / 16,
    ),
    "a100-h800": Likeness(
        nodes=((_A100_80, 2, ""), ("H800", 2, "")),
        model="gpt3-6.7b",
        seq_len=1024,
    ),
    "two-zones": _TWO_ZONES,
    "two-zones, llama-1b": replace(_TWO_ZONES, model="llama-1b"),
}


def row(name: str) -> dict[str, Any]:
    """Try all plans of a likeness, and plan it."""
    request, begin_s = LIKENESSES[name].request(), time.process_time()
    least_s = fastest_s(request)
    tried_s = time.process_time() - begin_s
    found = find_plan(request)
    step_s, bound_s = found.best_h1f1b.simulation.step_time_s, found.whole_bound.step_s
    return {
        "likeness": name,
        "plans": sum(1 for _ in all_plans(request)),
        "least_s": least_s,
        "plan_above": step_s / least_s - 1,
        "bound_below": None if bound_s is None else 1 - bound_s / least_s,
        "any_schedule_s": found.best.simulation.step_time_s,
        "any_schedule_gap": found.gap,
        "cpu_s": round(tried_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(LIKENESSES)
    parser.add_argument("--cases", nargs="+", default=names, choices=LIKENESSES)
    for name in parser.parse_args(arguments).cases:
        print(json.dumps(row(name)), flush=True)


if __name__ == "__main__":
    main()
