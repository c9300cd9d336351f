# SPDX-License-Identifier: Apache-2.0
"""The two commands of the README, as printed, in an empty folder.

Training runs in this process, shortened only by `SHORTER`. The test only checks the
text of the commands that install the package (`tests/test_package.py` tests more).
`tests/docs/test_pages.py` covers all other commands of README and docs.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetjax.train import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "start.md"]  # where a visitor may start
# options after the printed ones, for seconds instead of minutes; {cache} holds what the
# workers of other tests have compiled
SHORTER = (
    "--data.path text.txt --data.cache-dir {cache} --steps 2 "
    "--evaluation.num-batches 1 --evaluation.sample-tokens 2"
)


def commands(page: Path) -> Sequence[str]:
    """Return the lines of the page's code blocks that install or train."""
    blocks = re.findall(
        r"^```(?:bash)?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [line for line in "".join(blocks).splitlines() if "venv .venv" in line]


@pytest.mark.usefixtures("environment", "quick_compiling")
def test_the_first_command_trains_in_an_empty_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text((ROOT / "LICENSE").read_text())
    _, _, found = commands(PAGES[0])[0].partition("python -m hetjax.train ")
    shorter = SHORTER.format(cache=cache).split()
    assert main([*shlex.split(found), *shorter]) == 0, capsys.readouterr().err
    assert (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


def test_a_visitor_is_told_the_same_first_command_everywhere():
    first, second = commands(PAGES[0])
    assert commands(PAGES[1]) == [first]
    assert first.endswith("/python -m hetjax.train tiny") and "pytest" in second


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_to_be_installed_is_this_package(page: Path):
    for line in commands(page):
        assert line.startswith("python3 -m venv .venv && ")
        assert re.search(r" && \.venv/bin/pip install (\.|-e '\.\[dev\]') && ", line)
