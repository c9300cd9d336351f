# SPDX-License-Identifier: Apache-2.0
"""The page on reports has the list of all metrics, as mkdocs makes it."""

import importlib.util
import re
from pathlib import Path

from hetjax.report.metrics import METRICS

ROOT = Path(__file__).parents[2]


def test_the_page_lists_each_metric_with_its_unit():
    path = ROOT / "docs" / "metrics.py"
    assert "- docs/metrics.py" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("metrics", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert module.PLACE in page
    made = module.on_page_markdown(page, page=None, config=None, files=None)
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.*?) \| .+ \|$", made, re.MULTILINE)
    units = {metric.key: metric.unit for metric in METRICS}
    assert [row for row in rows if row[0] in units] == [*units.items()]
    assert module.on_page_markdown("# A page") == "# A page"
