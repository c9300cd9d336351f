# SPDX-License-Identifier: Apache-2.0
"""What the README and pages refer to exists: names, files, headings and the picture.

The phase `docs` of `.ci/run` checks that pages build and that their links resolve.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hetjax

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_api_page_has_every_public_name_and_no_other():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: hetjax\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(hetjax.__all__)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(listed) == pages and len(listed) == len(pages)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((.*?)\)", README))))
def test_links_of_the_readme_lead_to_a_file_and_to_a_heading_of_it(target: str):
    path, _, anchor = target.partition("#")
    assert (ROOT / path).is_file()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert anchor in [
            re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
        ]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_nothing_on_a_page_comes_from_another_host():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert not re.search(r"^extra_(css|javascript)|https?://", settings, re.MULTILINE)
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        assert not re.search(r"!\[[^]]*\]\(http|<script|<iframe", page.read_text())


def words_of(picture: Path) -> list[str]:
    """Return the text in an SVG."""
    words = re.findall(r"<text.*?>(.*?)</text>", picture.read_text(encoding="utf-8"))
    assert words
    return words


def test_the_picture_of_the_readme_is_of_the_measured_result(tmp_path: Path):
    """Its words and numbers are those that its command draws again."""
    told = " ".join(README.split())
    (drawn_by,) = re.findall(r"`python -m experiments\.testbed\.demo (.*?)`", told)
    (shown,) = re.findall(r"!\[.*?\]\((docs/\S+)\)", told)
    result, again = drawn_by.split()[1], tmp_path / "again.svg"
    command = [sys.executable, "-m", "experiments.testbed.demo", "--result", result]
    subprocess.run([*command, "--plot", str(again)], cwd=ROOT, check=True)
    assert words_of(again) == words_of(ROOT / shown), f"draw {shown} again: {drawn_by}"
    faster = json.loads((ROOT / result).read_text(encoding="utf-8"))["faster"]
    for name, words in (
        ("even split", "an even split"),
        ("fast alone", "the fast host"),
    ):
        assert f"{faster[name]:.2f} times as fast as {words}" in told
