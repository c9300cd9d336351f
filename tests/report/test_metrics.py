# SPDX-License-Identifier: Apache-2.0
"""Each metric is shown where the table says, and nowhere else."""

import re
from collections import Counter

import pytest

from hetjax.report.display import metrics_line
from hetjax.report.html.run_page import run_page
from hetjax.report.journals import Metrics
from hetjax.report.metrics import KEYS, METRICS, Metric
from hetjax.report.run_report import RunReport
from tests.report.html_page import Page
from tests.report.test_run_page import record

LINES = [
    {"step": step, **{key: n + step / 8 for n, key in enumerate(KEYS, start=1)}}
    for step in (1, 2, 3, 9)
]
RUN = record([*LINES], [])
PAGE = Page(run_page(RUN))


@pytest.mark.parametrize("metric", METRICS, ids=KEYS)
def test_a_metric_is_shown_where_the_table_says(metric: Metric):
    n = 1 + KEYS.index(metric.key)
    shown = metric.format(n + 9 / 8)
    in_line = f"  {metric.key} {shown}" in metrics_line(LINES[-1], 9)
    assert in_line == metric.in_progress
    headline = {"last": n + 9 / 8, "median": n + 2.5 / 8, None: None}[metric.headline]
    assert RunReport(RUN).values().get(metric.key) == headline
    figure = PAGE.figures().get(metric.headline_label)
    assert figure == (None if headline is None else metric.format(headline))
    assert metric.axes is None or metric.axes.title in PAGE.words
    header = re.split(" {2,}", str(Metrics(LINES)).splitlines()[0].strip())
    assert header == ["step", *KEYS]


def test_metrics_can_be_told_apart():
    for names in (KEYS, [metric.label for metric in METRICS]):
        assert len({*names}) == len(names)
    curves = Counter(metric.axes for metric in METRICS if metric.axes)
    assert max(curves.values()) <= 2  # each has a colour
