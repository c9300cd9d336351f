# SPDX-License-Identifier: Apache-2.0
"""What the page Trust says about limits and tests is true."""

import importlib
import re
from pathlib import Path

from hetjax.runtime.rpc.message import LIMITS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how/trust.md").read_text()
ROW = re.compile(r"^\| .* \| (\d+)(?: s)? \| `(hetjax\.[\w.]+)` \|$", re.M)


def test_every_limit_of_the_table_is_the_one_in_the_code():
    rows = ROW.findall(PAGE)
    assert len(rows) >= 13
    for value, path in rows:
        module, _, name = path.rpartition(".")
        assert float(value) == getattr(importlib.import_module(module), name), path


def test_every_request_has_its_row():
    found = dict(re.findall(r"^\| ([a-z ,]+) \| (\d+) \|$", PAGE, re.M))
    limits = {limit.what: f"{limit.seconds / 60:g}" for limit in LIMITS.values()}
    assert found == limits


def test_every_defence_names_tests_that_are_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []
