# SPDX-License-Identifier: Apache-2.0
"""`hetjax NAME` is `python -m hetjax.NAME`, and is quick where possible."""

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


def test_without_a_command_it_is_bad_input(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["train", "--help"], ["plan"]])
def test_one_name_and_module_say_the_same(given: list[str]):
    done, other = (
        subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        for words in (["hetjax", *given], [f"hetjax.{given[0]}", *given[1:]])
    )
    assert (done.returncode, done.stdout) == (other.returncode, other.stdout)
    assert done.stderr == other.stderr
