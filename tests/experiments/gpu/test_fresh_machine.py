# SPDX-License-Identifier: Apache-2.0
"""A machine with only JAX and no network runs a session, from the listed wheels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu.rows import PartFile
from experiments.gpu.wheels import download

GPU = Path(__file__).parents[3] / "experiments" / "gpu"
RELEASES = ("0.11.2", "0.12.0.1")
_IS_312 = sys.version_info[:2] == (3, 12)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of the committed list."""
    folder = tmp_path_factory.mktemp("wheels")
    lines = (GPU / "wheels-3.12.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line.split()[0] for line in lines if not line.startswith("#")]
    download("3.12", requirements, folder)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(not _IS_312, reason="the list is for Python 3.12")
@pytest.mark.parametrize("jax", RELEASES)
def test_jax_and_the_wheels_are_enough(tmp_path: Path, wheels: Path, jax: str):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    there = (f"jax=={jax}", "flax", "optax", "orbax-checkpoint")
    subprocess.run([python, "-m", "pip", "install", "-q", *there], check=True)
    output = tmp_path / "session"
    command = [GPU / "session.sh", "--wheels", wheels, "--platform", "cpu", "--quick"]
    command += ["--output", output, "--budget-s", "6000", "--parts", "bits"]
    offline = {"PYTHON": str(python), "PIP_NO_INDEX": "1"}
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, check=True, env=clean | offline)
    found = PartFile(output, "bits").read()
    assert found.state == "done", found.why
