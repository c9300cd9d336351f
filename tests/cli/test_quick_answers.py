# SPDX-License-Identifier: Apache-2.0
"""Help and refusals come before any slow import.

No clock: the test looks at what is imported, which is the same on every machine.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from hetjax.__main__ import COMMANDS

SLOW = {"cvxpy", "flax", "grain", "jax", "optax", "orbax", "ray", "scipy", "matplotlib"}
HELP = [[name, "--help"] for name in COMMANDS]
REFUSED = [
    ["tain"],
    ["train", "tiny", "--stepz", "3"],
    ["train", "tiny", "--steps", "many"],
    ["train", "tini"],
    ["train", "tiny", "--model", "tini"],
    ["train", "tiny", "--cluster", "missing.toml"],
    ["train", "tiny", "--plan", "missing.json"],
    ["train", "tiny", "--profile", "missing.json"],
    ["train", "tiny", "--calibration", "missing.json"],
    ["train", "tiny", "--data.path", "missing.txt"],
    ["train", "tiny", "--data.mixture", "a-file.txt=1,missing.txt=1"],
    ["train", "tiny", "--data.mixture", "a-file.txt=none"],
    ["train", "tiny", "--data.validation", "missing.txt"],
    ["train", "tiny", "--run-dir", "a-file"],
    ["demo", "--clustre", "lab"],
    ["demo", "--model", "tini"],
    ["demo", "--cluster", "missing.toml"],
    ["demo", "--cluster", "unknown.toml"],
    ["demo", "--plot", "missing/demo.png"],
    ["demo", "--seconds", "3600"],
    ["plan", "tiny", "--outptu", "plan.json"],
    ["plan", "tiny", "--model", "tini"],
    ["plan", "tiny", "--cluster", "missing.toml"],
    ["plan", "tiny", "--cluster", "unknown.toml", "--plot", "plan.png"],
    ["plan", "tiny", "--profile", "missing.json"],
    ["plan", "tiny", "--calibration", "missing.json"],
    ["plan", "tiny", "--from", "missing.json"],
    ["plan", "tiny", "--output", "missing/plan.json"],
    ["plan", "tiny", "--report", "missing/plan.html"],
    ["simulate", "tiny", "--scheduel", "1f1b"],
    ["simulate", "missing.json"],
    ["simulate", "a-file"],
    ["simulate", "tiny", "--model", "tini"],
    ["simulate", "tiny", "--cluster", "missing.toml"],
    ["simulate", "tiny", "--profile", "missing.json"],
    ["simulate", "tiny", "--calibration", "a-file"],
    ["simulate", "tiny", "--trace", "missing/trace.json"],
    ["profile", "tiny", "--tensro", "2"],
    ["profile", "tiny", "--cluster", "missing.toml"],
    ["profile", "tiny", "--output", "missing/profile.json"],
    ["profile", "tiny", "--output", "a-file"],
    ["profile", "tiny", "--sailor", "missing.json"],
    ["doctor", "--clustre", "lab"],
    ["doctor", "--peers", "box"],
    ["doctor", "--peers", "box:http"],
    ["doctor", "--ports", "0"],
    ["doctor", "--listen", "70000"],
    ["doctor", "--probe", "--json"],
    ["launch", "ssh", "missing.toml", "--", "train", "tiny"],
    ["launch", "slurm", "missing.toml", "--", "train", "tiny"],
    ["worker", "--join", "here"],
    ["worker", "--jion", "here"],
    ["train", "tiny", "--launcher", "join"],
    ["preempt", "missing"],
    ["preempt", "missing", "--noed", "a"],
]

_UNKNOWN_DEVICE = """
name = "mine"
[[node]]
name = "box"
device = "A100-SMX4-40GB"
count = 2
"""


def told(folder: Path, words: list[str]) -> tuple[int, set[str], str]:
    """Return the exit code, the names of all imports, and an error's text."""
    script = (
        "import sys\n"
        "from hetjax.__main__ import main\n"
        "code = 1\n"
        "try:\n"
        f"    code = main({words!r})\n"
        "except SystemExit as ended:\n"
        "    code = ended.code or 0\n"
        "finally:\n"
        "    open('imported', 'w').write(' '.join(sys.modules))\n"
        "sys.exit(code)\n"
    )
    (folder / "a-file").write_text("{}")
    (folder / "a-file.txt").write_text("text")
    (folder / "unknown.toml").write_text(_UNKNOWN_DEVICE)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    modules = (folder / "imported").read_text().split()
    return done.returncode, {name.partition(".")[0] for name in modules}, done.stderr


@pytest.mark.parametrize("words", [["--version"], ["--help"], *HELP])
def test_help_is_there_at_once(words: list[str], tmp_path: Path):
    code, imported, error = told(tmp_path, words)
    assert (code, error) == (0, "")
    assert not SLOW & imported


@pytest.mark.parametrize("name", ["train", "plan", "profile"])
def test_help_on_the_options_of_a_preset_is_there_at_once(name: str, tmp_path: Path):
    code, imported, error = told(tmp_path, [name, "tiny", "--help"])
    assert (code, error) == (0, "")
    assert not SLOW & imported


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_is_refused_at_once(words: list[str], tmp_path: Path):
    code, imported, error = told(tmp_path, words)
    assert code == 2
    parts = [line.partition(":")[0] for line in error.splitlines()]
    assert parts == ["hetjax", "got", "allowed", "fix"], error
    assert not SLOW & imported


def test_import_hetjax_imports_nothing_else(tmp_path: Path):
    script = "import sys, hetjax; dir(hetjax); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    imported = {name for name in done.stdout.split() if name.startswith("hetjax")}
    assert imported == {"hetjax"}
    assert not SLOW & {name.partition(".")[0] for name in done.stdout.split()}
