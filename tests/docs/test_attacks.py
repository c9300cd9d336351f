# SPDX-License-Identifier: Apache-2.0
"""The page Attacks tells what the results say, of all findings."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how/attacks.md").read_text()
RESULTS = ROOT / "experiments/results/attacks.jsonl"


def test_each_row_is_the_one_of_the_results_and_all_were_withstood():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert all(row["ok"] and not row["wrong"] for row in rows)
    told = re.findall(r"^\| (F\d+) \| (.+) \| (.+) \|$", PAGE, re.M)
    expected = [(row["finding"], row["done"], row["happened"]) for row in rows]
    assert told == sorted(expected, key=lambda row: int(row[0][1:]))
    assert [finding for finding, *_ in told] == [f"F{n}" for n in range(1, 18)]


def test_the_results_name_their_commits_and_no_folder_of_a_machine():
    text = RESULTS.read_text()
    assert "/tmp" not in text and "/home" not in text
    commits = {json.loads(line)["commit"] for line in text.splitlines()}
    assert all(re.fullmatch("[0-9a-f]{7,40}", commit) for commit in commits)
