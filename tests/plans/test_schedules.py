# SPDX-License-Identifier: Apache-2.0
"""The table of schedules, and what users read about it."""

import re
from pathlib import Path

import pytest

from hetjax.plans.schedules import FITTED, SCHEDULES, default_launch_ahead
from hetjax.simulate import main

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_the_help_tells_of_every_schedule(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().out).split())
    for name, summary in FITTED.items():
        assert f"{name}: {summary}" in text
    for name, schedule in SCHEDULES.items():
        assert f"{name}: {schedule.summary}" in text


def test_what_the_docs_tell_of_schedules_is_in_the_table():
    text = PAGE.read_text(encoding="utf-8")
    rows = text.split("| schedule | what it does |\n| --- | --- |\n")[1].split("\n\n")[
        0
    ]
    told = dict(re.findall(r"^\| `(.*)` \| (.*) \|$", rows, re.MULTILINE))
    assert len(told) == len(rows.splitlines()) > 3
    assert told == {name: row.summary for name, row in SCHEDULES.items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_launch_aheads_that_nobody_writes_are_from_1_up_and_do_not_rise(name: str):
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 8):
            aheads = [
                default_launch_ahead(
                    name,
                    num_stages=num_stages,
                    stage=s,
                    num_microbatches=num_microbatches,
                )
                for s in range(num_stages)
            ]
            assert aheads == sorted(aheads, reverse=True) and aheads[-1] >= 1
