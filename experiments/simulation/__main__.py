# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.simulation`: runs many seeds and reports what they found.

    python -m experiments.simulation --runs 100000 --output FILE
    python -m experiments.simulation --seed 650
    python -m experiments.simulation --mutations --runs 1000

The first command appends one line per hundred runs to the file, and continues after the
file's last line. The second runs one seed and prints its last events. Exit code 1 if a
run violates an invariant. The third breaks the protocol's rules one at a time and
prints which run notices each.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.simulation.mutations import MUTATIONS, first_found, table_row
from experiments.simulation.run import Outcome, simulate

_BATCH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.simulation")
    parser.add_argument("--runs", type=int, default=1000, help="how many in all")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--output", type=Path, help="a line of JSON per 100 runs")
    parser.add_argument("--seed", type=int, help="run this seed, print its events")
    parser.add_argument(
        "--mutations", action="store_true", help="which runs notice broken rules"
    )
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _tell(simulate(options.seed))
    if options.mutations:
        return _tell_found(range(options.first, options.first + options.runs))
    rows = _read(options.output)
    first = options.first + sum(row["runs"] for row in rows)
    last = options.first + options.runs
    for start in range(first, last, _BATCH):
        rows.append(batch(range(start, min(start + _BATCH, last))))
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(json.dumps(summary(rows), indent=1))
    return int(any(row["violations"] for row in rows))


def batch(seeds: range) -> dict[str, Any]:
    """Run these seeds and return their combined counts."""
    begin_s = time.process_time()
    outcomes = [simulate(seed) for seed in seeds]
    faults: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
    return {
        "commit": _commit(),
        "first": seeds.start,
        "runs": len(seeds),
        "events": sum(outcome.num_events for outcome in outcomes),
        "starts": sum(outcome.num_starts for outcome in outcomes),
        "recoveries": sum(outcome.num_recoveries for outcome in outcomes),
        "detours": sum(outcome.num_detours for outcome in outcomes),
        "faults": dict(faults),
        "cpu_s": round(time.process_time() - begin_s, 2),
        "violations": {o.seed: o.violation for o in outcomes if o.violation},
    }


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined counts of all batches."""
    rows = list(rows)
    faults: Counter[str] = Counter()
    for row in rows:
        faults.update(row["faults"])
    cpu_s = sum(row["cpu_s"] for row in rows)
    num_runs = sum(row["runs"] for row in rows)
    return {
        "runs": num_runs,
        "events": sum(row["events"] for row in rows),
        "starts": sum(row["starts"] for row in rows),
        "recoveries": sum(row["recoveries"] for row in rows),
        "detours": sum(row.get("detours", 0) for row in rows),
        "faults": sum(faults.values()),
        "faults_by_kind": dict(faults.most_common()),
        "runs_per_cpu_s": round(num_runs / cpu_s, 1) if cpu_s else None,
        "violations": {s: v for row in rows for s, v in row["violations"].items()},
    }


def _tell(outcome: Outcome) -> int:
    for line in outcome.told:
        print(line)
    print(
        f"seed {outcome.seed}: {outcome.violation or 'all is well'}; {outcome.faults}"
    )
    return int(outcome.violation is not None)


def _tell_found(seeds: range) -> int:
    for mutation in MUTATIONS:
        print(table_row(mutation, first_found(mutation, seeds)), flush=True)
    return 0


def _read(output: Path | None) -> list[dict[str, Any]]:
    if output is None or not output.exists():
        return []
    return [json.loads(line) for line in output.read_text().splitlines()]


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
