# SPDX-License-Identifier: Apache-2.0
"""Short runs skip what they list, and nothing that JAX could change."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax_free import ROOT, jax_free_files, reaches_jax

DRAWN = """
import pytest
from tests.short_runs import draws

@pytest.mark.parametrize("seed", draws(range(5), short=2))
def test_drawn(seed):
    print("seed", seed)

def test_always():
    pass
"""
# Imports each file as pytest does, with everything blocked that the contract bans
WITHOUT_JAX = """
import importlib.util, sys
for name in ("flax", "jax", "jaxlib", "optax", "orbax"):
    sys.modules[name] = None
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("a_test", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def run_pytest(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize("whole", [False, True])
def test_draws_are_few_unless_all_are_asked_for(
    processes: str, whole: bool, tmp_path: Path
):
    (tmp_path / "test_it.py").write_text(DRAWN)
    options = ["--rootdir", str(ROOT), "-n", processes, *["--whole"] * whole]
    options += ["-p", "tests.short_runs", "-p", "tests.one_process", "--verbose"]
    options += ["--dist", "loadgroup"]  # as in setup.cfg
    done = run_pytest(*options, str(tmp_path))
    assert f"{6 if whole else 3} passed" in done.stdout, done.stdout + done.stderr
    said = "left out: --whole runs them" in done.stdout
    assert said == ("   3 of " in done.stdout) == (not whole)
    if processes == "2":  # the tests of a file are together
        assert len(set(re.findall(r"^\[gw\d\]", done.stdout, re.M))) == 1


def test_files_that_a_second_jax_leaves_out_are_said_and_others_collected():
    words = ("--without-jax-free-rooms", "--collect-only", "-q", "tests/plans")
    done = run_pytest(*words)
    collected, left_out = done.stdout.split("no release of JAX can change them")
    assert "tests/plans/test_even.py" in left_out
    assert "tests/plans/test_even.py" not in collected
    assert "tests/plans/test_worker_map.py" in collected  # compares with JAX's meshes
    assert "tests/plans/test_schedules.py" in collected  # calls `hetjax simulate`


def test_what_a_second_jax_leaves_out_is_imported_where_there_is_no_jax():
    files = map(str, sorted(jax_free_files()))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_what_a_second_jax_leaves_out_passes_where_there_is_no_jax(tmp_path: Path):
    """Also imports while tests run; without the hooks, which import JAX."""
    (tmp_path / "no_jax.py").write_text(WITHOUT_JAX.partition("for path")[0])
    files = map(str, sorted(jax_free_files()))
    done = run_pytest(
        *("-n", "0", "--noconftest", "-p", "tests.short_runs"),
        *("-o", f"pythonpath={tmp_path} {ROOT}", "-p", "no_jax", *files),
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "import jax.numpy as jnp",
        "def test():\n    from flax import nnx",
        "from hetjax.comm.reduction import row_sharding",
        "from hetjax.comm import reduction",
        "from tests.runtime.random_plans import random_case",
        "PROGRAM = 'import sys, jax'",
    ],
)
def test_a_file_that_reaches_jax_in_any_way_is_found(text: str, tmp_path: Path):
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert reaches_jax(file)
    file.write_text("from hetjax.plans import plan\n'jax'\n")
    assert not reaches_jax(file)
