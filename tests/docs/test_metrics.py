# SPDX-License-Identifier: Apache-2.0
"""The page on reports lists all metrics, as mkdocs builds it."""

import re

from hetjax.report.metrics import METRICS
from tests.docs.hooks import ROOT, hook


def test_the_page_lists_each_metric_with_its_unit():
    module = hook("metrics")
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert module.PLACE in page
    made = module.on_page_markdown(page, page=None, config=None, files=None)
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.*?) \| .+ \|$", made, re.MULTILINE)
    units = {metric.key: metric.unit for metric in METRICS}
    assert [row for row in rows if row[0] in units] == [*units.items()]
    assert module.on_page_markdown("# A page") == "# A page"
