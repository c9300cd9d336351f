# SPDX-License-Identifier: Apache-2.0
"""The page Attacks has what the results say of every finding."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how/attacks.md").read_text()
RESULTS = (ROOT / "experiments/results/attacks.jsonl").read_text()


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return a row of the table; anything unexpected is included."""
    happened = "; ".join((row["happened"], *row["wrong"]))
    return row["finding"], row["done"], happened


def test_the_table_has_a_row_for_each_finding_with_what_came_of_it():
    rows = [json.loads(line) for line in RESULTS.splitlines()]
    told = re.findall(r"^\| (F\d+) \| (.+) \| (.+) \|$", PAGE, re.M)
    assert told == sorted(map(cells, rows), key=lambda row: int(row[0][1:]))
    assert [finding for finding, *_ in told] == [f"F{n}" for n in range(1, 18)]


def test_the_results_name_their_commits_and_no_folder_of_a_machine():
    assert "/tmp" not in RESULTS and "/home" not in RESULTS
    commits = {json.loads(line)["commit"] for line in RESULTS.splitlines()}
    assert all(re.fullmatch("[0-9a-f]{7,40}", commit) for commit in commits)
