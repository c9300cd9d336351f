# SPDX-License-Identifier: Apache-2.0
"""`hetjax NAME` is `python -m hetjax.NAME`, and answers at once where it can."""

import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import hetjax
from hetjax.__main__ import main


def test_the_help_lists_every_module_that_is_a_command(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["--help"]) == 0
    folder = Path(next(iter(hetjax.__path__)))
    modules = {path.stem for path in folder.glob("*.py")}
    commands = modules - {"__init__", "__main__", "errors", "names"}
    told = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in told if line.startswith("  ")} == commands


def test_it_is_installed_as_a_command():
    (found,) = entry_points(group="console_scripts", name="hetjax")
    assert found.load() is main


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hetjax {version('hetjax')}\n"


@pytest.mark.parametrize("given", [[], ["trian"], ["train", "--help"], ["plan"]])
def test_one_name_and_module_say_the_same(given: list[str]):
    one = [sys.executable, "-m", "hetjax", *given]
    done = subprocess.run(one, capture_output=True, text=True)
    if given in ([], ["trian"]):
        assert done.returncode == 2
        assert not given or "did you mean 'train'?" in done.stderr
        return
    module = [sys.executable, "-m", f"hetjax.{given[0]}", *given[1:]]
    other = subprocess.run(module, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (other.returncode, other.stdout)
    assert done.stderr == other.stderr
