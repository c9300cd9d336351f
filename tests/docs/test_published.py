# SPDX-License-Identifier: Apache-2.0
"""The page on how sure predictions are has the table of published runs."""

import json
import re

from tests.docs.hooks import ROOT, hook


def test_the_page_has_a_row_for_each_family_of_the_result():
    module = hook("published")
    page = (ROOT / "docs" / "sure.md").read_text(encoding="utf-8")
    assert module.PLACE in page
    made = module.on_page_markdown(page, page=None, config=None, files=None)
    result = json.loads(module.RESULT.read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (.+?) \| (\d+) \| ([\d.]+) \|", made, re.MULTILINE)
    assert rows == [
        (f["name"], str(f["rows"]), f"{f['least']:.2f}") for f in result["families"]
    ]
    assert sum(int(count) for _, count, _ in rows) == result["rows"]
