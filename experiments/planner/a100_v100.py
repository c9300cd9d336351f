# SPDX-License-Identifier: Apache-2.0
"""Mixed A100 and V100 clusters: the planner's throughput, its bound, its search time.

    python -m experiments.planner.a100_v100 --groundtruth DIR [--json]

DIR holds layer profiles and link fits published with Sailor (eth-easl/sailor, MIT);
none of it is part of this repository. Cost terms are those under which planners were
compared before (`published_terms.py`): fp32, blocking messages, a gradient sum after
the pipeline that replicas of unlike tensor degree do not pay more for, GPU counts
without packing into nodes. `before` is the best throughput known under these terms, of
templates with at most one change of GPU kind; `sailor` that of Sailor's planner on its
own simulator. `gap` is the model gap: the plan's time by the closed form over the
certified bound of the same form. `prefix` is the bound that also holds for simulated
1F1B programs, and the plan's time over it: the closed form is a little pessimistic, so
this gap has that in it. `symmetric` is the best plan whose stages all have the same
tensor degree, the planner's default, found degree by degree. Search times are wall
seconds from layer tables to the plan, of unlike degrees, or of all symmetric plans.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.planner.published_terms import (
    TENSOR_DEGREES,
    Published,
    published_problem,
    read_published,
)
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.master import Layout, best_plan, lower_bound
from hetjax.planner.problem import Problem

GPUS = ("A100-40", "V100-16")
GAP_LIMIT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One cluster and model, with throughputs known before (iterations per second)."""

    model: str
    num_gpus: tuple[int, int]
    global_batch: int
    before: float | None = None
    sailor: float | None = None
    limit_s: float | None = None


def _opt(a100: int, v100: int, **known: float) -> Case:
    return Case(model="OPT-350", num_gpus=(a100, v100), global_batch=1024, **known)


def _neo(a100: int, v100: int, **known: float) -> Case:
    return Case(model="GPT-Neo-2.7", num_gpus=(a100, v100), global_batch=2048, **known)


CASES = (
    _opt(8, 8, before=0.0464, sailor=0.0435),
    _opt(16, 16, before=0.0866, sailor=0.0769, limit_s=1.0),
    _opt(16, 48, before=0.1216, sailor=0.1020),
    _opt(32, 96, before=0.2153, sailor=0.1700),
    _opt(80, 240, before=0.4599, sailor=0.3609),
    _opt(128, 384, before=0.6011, sailor=0.5229, limit_s=3.0),
    Case(
        model="OPT-350",
        num_gpus=(1024, 3072),
        global_batch=8192,
        before=0.6011,
        limit_s=10.0,
    ),
    _neo(8, 8),
    _neo(16, 16, limit_s=1.0),
    _neo(16, 48, before=0.0181, sailor=0.0140),
    _neo(32, 96, before=0.0336, sailor=0.0263),
    _neo(80, 240, before=0.0746, sailor=0.0583),
    _neo(128, 384, before=0.1085, sailor=0.0892, limit_s=3.0),
)


def study(folder: Path) -> dict[str, Any]:
    """Return all plans, bounds and times as plain values."""
    rows = [_row(case, folder) for case in CASES]
    return {
        "published": "layer profiles and link fits of eth-easl/sailor (MIT)",
        "command": "python -m experiments.planner.a100_v100 --groundtruth DIR --json",
        "gap_limit": GAP_LIMIT,
        "passes": all(row["passes"] for row in rows),
        "rows": rows,
    }


def _row(case: Case, folder: Path) -> dict[str, Any]:
    published = read_published(folder, case.model, GPUS)
    num_gpus: dict[str, int] = dict(zip(GPUS, case.num_gpus, strict=True))
    start_s = time.perf_counter()
    p = published_problem(published, num_gpus, case.global_batch)
    layout = best_plan(p, "closed")
    search_s = time.perf_counter() - start_s
    prefix_s = lower_bound(p, "prefix").step_s
    start_s = time.perf_counter()
    symmetric = _symmetric(published, num_gpus, case.global_batch)
    symmetric_search_s = time.perf_counter() - start_s
    per_s = 1 / layout.step_s
    return {
        "model": case.model,
        "num_gpus": case.num_gpus,
        "global_batch": case.global_batch,
        "iterations_per_s": round(per_s, 5),
        "before": case.before,
        "sailor": case.sailor,
        "bound": round(1 / layout.bound_s, 5),
        "gap": round(layout.gap, 5),
        "prefix_bound": round(1 / prefix_s, 5),
        "prefix_gap": round(layout.step_s / prefix_s - 1, 5),
        "symmetric": round(1 / symmetric.step_s, 5),
        "symmetric_search_s": round(symmetric_search_s, 2),
        "search_s": round(search_s, 2),
        "search_limit_s": case.limit_s,
        "passes": layout.gap <= GAP_LIMIT
        and (case.before is None or round(per_s, 4) >= case.before)
        and (case.limit_s is None or search_s < case.limit_s),
        "plan": _told(p, layout),
    }


def _symmetric(
    published: Published, num_gpus: dict[str, int], global_batch: int
) -> Layout:
    """Return the best plan of one tensor degree."""
    layouts = []
    for degree in TENSOR_DEGREES:
        p = published_problem(published, num_gpus, global_batch, (degree,))
        try:
            layouts.append(best_plan(p, "closed"))
        except NoFeasiblePlan:
            continue
    return min(layouts, key=lambda layout: layout.step_s)


def _told(p: Problem, layout: Layout) -> list[str]:
    """Say each kind of copies in words."""
    told = []
    for c in layout.copies:
        stages = [
            f"{p.classes[option.device_class].name} tensor {option.tensor} layers "
            f"{stage.layers[0]}:{stage.layers[1]}"
            for stage in c.template.stages
            for option in (p.options[stage.option],)
        ]
        told.append(
            f"{c.num_copies} x {c.num_microbatches} microbatches of "
            f"{c.template.microbatch_size}: {', '.join(stages)}"
        )
    return told


def table(result: dict[str, Any]) -> str:
    """Return the rows as aligned plain text; throughputs in iterations per second."""
    lines = [
        "model        A100+V100   sailor  before  hetjax  bound   gap    prefix bound"
        "    gap  search symmetric  search"
    ]
    for row in result["rows"]:
        gpus = "+".join(map(str, row["num_gpus"]))
        sailor, before = (
            f"{row[key]:.4f}" if row[key] else "-" for key in ("sailor", "before")
        )
        lines.append(
            f"{row['model']:<12} {gpus:<10} {sailor:>7} {before:>7}"
            f" {row['iterations_per_s']:7.4f} {row['bound']:6.4f} {row['gap']:6.2%}"
            f" {row['prefix_bound']:13.4f} {row['prefix_gap']:6.1%}"
            f" {row['search_s']:5.2f} s    {row['symmetric']:.4f}"
            f" {row['symmetric_search_s']:5.2f} s"
            f"{'' if row['passes'] else '  MISSED'}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groundtruth", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    given = parser.parse_args(arguments)
    result = study(given.groundtruth)
    print(json.dumps(result, indent=1) if given.json else table(result))


if __name__ == "__main__":
    main()
