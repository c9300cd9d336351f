# SPDX-License-Identifier: Apache-2.0
"""The commands of the README, as printed and in their order, in an empty folder.

They run in this process. What makes them short is in `SHORTER`, and nothing else is
changed; what installs the package is looked at only (`tests/test_package.py` knows
more), and what needs a Ray cluster is parsed.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hetjax import plan, profile, simulate, train
from hetjax.cli.train import parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MAIN: dict[str, Callable[[Sequence[str] | None], int]] = {
    "hetjax.train": train.main,
    "hetjax.plan": plan.main,
    "hetjax.simulate": simulate.main,
    "hetjax.profile": profile.main,
}
# options that come after those printed, for seconds in place of minutes; {cache} has
# what the workers of other tests have compiled
SHORTER = {
    "hetjax.train": "--data.path text.txt --data.cache-dir {cache} --steps 2 "
    "--evaluation.num-batches 1 --evaluation.sample-tokens 2",
    "hetjax.plan": "--compare none --microbatch-sizes 8 --tensor 1 --search-s 30",
    "hetjax.profile": "--microbatch-sizes 8 --remat none",
}


def commands() -> Sequence[str]:
    """Those of all code blocks, lines that go on put together."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    typed = [block for block in blocks if block.startswith("python")]
    return "".join(typed).replace("\\\n", " ").splitlines()


def of_hetjax(command: str) -> list[str]:
    """The module and its arguments; nothing for other commands."""
    found = re.search(r"\bpython -m (hetjax\..*)", command)
    return shlex.split(found.group(1)) if found else []


@pytest.mark.usefixtures("environment", "quick_compiling")
def test_every_command_works_as_printed_in_an_empty_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
):
    monkeypatch.chdir(tmp_path)
    (plan_text,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert "save it as `mine.json`" in TEXT
    (tmp_path / "mine.json").write_text(plan_text)
    (tmp_path / "text.txt").write_text((ROOT / "LICENSE").read_text())
    for command in commands():
        module, *arguments = of_hetjax(command) or [""]
        if not module or "ray" in arguments:
            continue
        shorter = SHORTER.get(module, "").format(cache=cache).split()
        assert MAIN[module]([*arguments, *shorter]) == 0, (
            command + capsys.readouterr().err
        )
    made = {path.name for path in tmp_path.iterdir()}
    assert {"plan.json", "plan.html", "plan.png", "profile.json", "faster.json"} <= made


def test_the_commands_are_those_that_are_tried():
    every = [of_hetjax(command) for command in commands()]
    assert {words[0] for words in every if words} == MAIN.keys()
    assert len([words for words in every if words]) >= 9


def test_what_is_to_be_installed_is_this_package():
    installing = [line for line in commands() if "venv" in line]
    assert len(installing) == 2 and "python3 -m venv .venv &&" in installing[0]
    for line in installing:
        assert re.search(r" && \.venv/bin/pip install (\.|-e '\.\[dev\]') && ", line)


def test_what_needs_a_ray_cluster_says_so_and_can_be_parsed():
    (command,) = [line for line in commands() if "--launcher ray" in line]
    _, *arguments = of_hetjax(command)
    config, _ = parse(arguments)
    assert config.launcher == "ray"
    before = TEXT[: TEXT.index(command)].rstrip("`\n").rpartition("\n\n")[2]
    assert "Ray cluster, which this needs" in " ".join(before.split())
