# SPDX-License-Identifier: Apache-2.0
"""Compares the planner with Sailor's on mixed A100 and V100 clusters, in two columns.

    python -m experiments.planner.a100_v100 --groundtruth DIR [--results FILE] [--json]

DIR holds layer profiles and link fits published with Sailor (eth-easl/sailor, MIT);
none of it is part of this repository. `sailor` is the throughput of Sailor's planner on
its own simulator, whose rule is the slowest pipeline plus the longest gradient sum, on
the ring of all replicas. Both columns assume fp32, blocking messages, and GPU counts
without packing into nodes (`published_terms.py`). Both include plans that Sailor's
planner does not consider: uneven cuts, unlike replicas and microbatches.

* `sailors_rule`: planned for Sailor's own rule (`sailor_rule.py`) and priced by it.
  This is the fair comparison. No bound is known for it.
* `own_sum_terms`: terms more favourable than Sailor's, under which planners were
  compared before. Each replica waits for its own gradient sum only, on a ring of 16 of
  its own kind, and unlike tensor degrees cost nothing. These terms have a certified
  bound. `by_sailors_rule` prices this column's plan by Sailor's rule.

`before` is the best throughput known earlier under the favourable terms, for templates
with at most one change of GPU kind. `gap` is the model gap: the plan's time by the
closed form over the certified bound of the same form, less one. `prefix_bound` also
holds for simulated 1F1B programs; `prefix_gap` is the plan's time over it, less one.
The closed form is a little pessimistic, and this gap includes that. `symmetric` is the
best plan whose stages all have the same tensor degree, the planner's default, found
degree by degree. Search times are CPU seconds from layer tables to the plan, because
the machine may be busy: `search_s` with unlike degrees, `symmetric_search_s` for all
symmetric plans.

Rows are added to the results, a JSON file, one by one; a second start continues there.
"""

import argparse
import json
import sys
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
from experiments.planner.sailor_rule import SailorRule
from experiments.planner.sailor_search import best_by_rule
from hetjax.errors import NoFeasiblePlan
from hetjax.files.writing import write_whole
from hetjax.planner.model.problem import Problem
from hetjax.planner.search.integer_master import ColumnCount
from hetjax.planner.search.price_and_branch import UnplacedPlan, candidates, lower_bound

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


def study(folder: Path, results: Path | None) -> dict[str, Any]:
    """Return all plans, bounds and times as plain values."""
    there = results is not None and results.exists()
    rows = json.loads(results.read_text())["rows"] if results and there else []
    done = {(row["model"], *row["num_gpus"]) for row in rows}
    told = _told_of(rows)
    for case in CASES:
        if (case.model, *case.num_gpus) in done:
            continue
        rows.append(_row(case, folder))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        told = _told_of(rows)
        if results is not None:
            write_whole(results, json.dumps(told, indent=1) + "\n")
    return told


def _told_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "published": "layer profiles and link fits of eth-easl/sailor (MIT)",
        "command": "python -m experiments.planner.a100_v100 --groundtruth DIR "
        "--results FILE",
        "columns": {
            "sailors_rule": "planned for and priced by Sailor's own rule: slowest "
            "pipeline plus longest sum on the ring of all replicas",
            "own_sum_terms": "more favourable than Sailor's: each replica waits for "
            "its own sum, on a ring of 16 of its kind",
        },
        "gap_limit": GAP_LIMIT,
        "passes": all(row["passes"] for row in rows),
        "rows": rows,
    }


def _row(case: Case, folder: Path) -> dict[str, Any]:
    published = read_published(folder, case.model, GPUS)
    num_gpus: dict[str, int] = dict(zip(GPUS, case.num_gpus, strict=True))
    start_s = time.process_time()
    p = published_problem(published, num_gpus, case.global_batch)
    layout = candidates(p, "closed")[0]
    search_s = time.process_time() - start_s
    rule = SailorRule(published=published, problem=p)
    own = _own_sums(case, published, rule, layout) | {"search_s": round(search_s, 2)}
    start_s = time.process_time()
    fair = best_by_rule(rule, num_gpus, [layout.copies])
    fair_search_s = time.process_time() - start_s
    return {
        "model": case.model,
        "num_gpus": case.num_gpus,
        "global_batch": case.global_batch,
        "sailor": case.sailor,
        "sailors_rule": {
            "iterations_per_s": round(1 / fair.step_s, 5),
            "over_sailor": _over(case, fair.step_s),
            "search_s": round(fair_search_s, 2),
            "plan": _told(p, fair.copies),
        },
        "own_sum_terms": own,
        "search_limit_s": case.limit_s,
        "passes": bool(
            layout.gap <= GAP_LIMIT
            and (case.before is None or round(1 / layout.step_s, 4) >= case.before)
            and (case.limit_s is None or search_s < case.limit_s)
            and (case.sailor is None or fair.step_s < 1 / case.sailor)
        ),
    }


def _own_sums(
    case: Case, published: Published, rule: SailorRule, layout: UnplacedPlan
) -> dict[str, Any]:
    p = rule.problem
    num_gpus: dict[str, int] = dict(zip(GPUS, case.num_gpus, strict=True))
    prefix_s = lower_bound(p, "prefix").step_s
    start_s = time.process_time()
    symmetric = _symmetric(published, num_gpus, case.global_batch)
    symmetric_search_s = time.process_time() - start_s
    by_rule_s = rule.step_s(layout.copies)
    return {
        "iterations_per_s": round(1 / layout.step_s, 5),
        "over_sailor": _over(case, layout.step_s),
        "by_sailors_rule": round(1 / by_rule_s, 5),
        "by_sailors_rule_over_sailor": _over(case, by_rule_s),
        "before": case.before,
        "bound": round(1 / layout.bound_s, 5),
        "gap": round(layout.gap, 5),
        "prefix_bound": round(1 / prefix_s, 5),
        "prefix_gap": round(layout.step_s / prefix_s - 1, 5),
        "symmetric": round(1 / symmetric.step_s, 5),
        "symmetric_search_s": round(symmetric_search_s, 2),
        "plan": _told(p, layout.copies),
    }


def _over(case: Case, step_s: float) -> float | None:
    """Return the gain over Sailor's planner, as a share of Sailor's throughput."""
    return None if case.sailor is None else round(1 / step_s / case.sailor - 1, 4)


def _symmetric(
    published: Published, num_gpus: dict[str, int], global_batch: int
) -> UnplacedPlan:
    """Return the best plan with a single tensor degree."""
    layouts = []
    for degree in TENSOR_DEGREES:
        p = published_problem(published, num_gpus, global_batch, (degree,))
        try:
            layouts.append(candidates(p, "closed")[0])
        except NoFeasiblePlan:
            continue
    return min(layouts, key=lambda layout: layout.step_s)


def _told(p: Problem, copies: Sequence[ColumnCount]) -> list[str]:
    """Describe each group of equal copies in words."""
    told = []
    for c in copies:
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
        "                                   by Sailor's rule       own sums only: more "
        "favourable than Sailor's",
        "model        A100+V100   sailor  hetjax    over  search  hetjax    over  by "
        "rule   bound    gap  search  symmetric",
    ]
    for row in result["rows"]:
        gpus = "+".join(map(str, row["num_gpus"]))
        fair, own = row["sailors_rule"], row["own_sum_terms"]
        sailor = f"{row['sailor']:.4f}" if row["sailor"] else "-"
        overs = [
            "-" if one["over_sailor"] is None else f"{one['over_sailor']:+.1%}"
            for one in (fair, own)
        ]
        lines.append(
            f"{row['model']:<12} {gpus:<10} {sailor:>7}"
            f"  {fair['iterations_per_s']:.4f} {overs[0]:>7} {fair['search_s']:5.0f} s"
            f"  {own['iterations_per_s']:.4f} {overs[1]:>7}"
            f"   {own['by_sailors_rule']:.4f}  {own['bound']:.4f} {own['gap']:6.2%}"
            f" {own['search_s']:5.2f} s  {own['symmetric']:.4f}"
            f"{'' if row['passes'] else '  MISSED'}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groundtruth", type=Path, required=True, metavar="DIR")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    given = parser.parse_args(arguments)
    result = study(given.groundtruth, given.results)
    print(json.dumps(result, indent=1) if given.json else table(result))


if __name__ == "__main__":
    main()
