# SPDX-License-Identifier: Apache-2.0
"""A machine with JAX and without a network gets what else hetjax needs."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.gpu.wheels import MOST_BYTES, THERE, UNUSED, hetjax_requires, reached

GPU = Path(__file__).parents[3] / "experiments" / "gpu"
BROUGHT = {"ml-dtypes", "rich", "typing-extensions"}  # by JAX and flax
LACKED = "hetjax-test-lacked"
# Runs as Python, except that a session only prints its arguments.
STUB = f"""#!/usr/bin/env bash
case "$*" in
    *experiments.gpu.session*--wait*) trap 'echo ended; exit 7' TERM; echo up
        while :; do sleep 0.1; done ;;
    *experiments.gpu.session*) echo "$*"
        exec "{sys.executable}" -c 'import hetjax_test_lacked as found, hetjax
print(found.WORD)' ;;
esac
exec "{sys.executable}" "$@"
"""


def test_the_list_is_small_and_has_what_hetjax_needs():
    text = (GPU / "wheels-3.12.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    sizes = [int(line.split()[-2].replace(",", "")) for line in lines]
    assert f"# {sum(sizes):,} bytes in all" in text
    assert sum(sizes) < MOST_BYTES
    names = {line.partition("==")[0] for line in lines}
    required = {canonicalize_name(Requirement(line).name) for line in hetjax_requires()}
    assert required - {*THERE} - BROUGHT <= names
    assert names.isdisjoint({*THERE, *UNUSED})


def test_packages_are_followed_by_extras_and_markers():
    packages = {
        "a": {"requires_dist": ["B_b[more]>=1", 'old; python_version < "3.12"']},
        "b-b": {"requires_dist": ['c; extra == "more"', 'd; extra == "other"']},
        "c": {"requires_dist": ["a", "solver"]},
        "solver": {"requires_dist": ["of-solver"]},
        "of-solver": {},
        "old": {},
    }
    assert reached(packages, ["A"], "3.12", ["solver"]) == {"a", "b-b", "c"}
    assert reached(packages, ["b-b"], "3.12") == {"b-b"}
    everything = {"a", "b-b", "c", "solver", "of-solver"}
    assert reached(packages, ["A"], "3.12") == everything
    assert reached(packages, ["A"], "3.11") == {*everything, "old"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with a wheel that this Python lacks, and a broken one that it has."""
    folder = tmp_path / "some wheels"
    folder.mkdir()
    stem, info = f"{LACKED.replace('-', '_')}-1.0", "METADATA WHEEL RECORD".split()
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{LACKED.replace('-', '_')}.py", "WORD = 'installed'\n")
        for name in info:
            wheel.writestr(f"{stem}.dist-info/{name}", CONTENTS[name])
    (folder / "numpy-0.1-py3-none-any.whl").write_bytes(b"")
    return folder


CONTENTS = {
    "METADATA": f"Metadata-Version: 2.1\nName: {LACKED}\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def started(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the script on a machine where only this Python has JAX."""
    stub, temporary = folder / "stub", folder / "temporary"
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    temporary.mkdir()
    return subprocess.Popen(
        [GPU / "session.sh", *arguments],
        env=os.environ | {"PYTHON": str(stub), "TMPDIR": str(temporary)},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def left(folder: Path) -> list[Path]:
    return [*(folder / "temporary").iterdir()]


def test_what_is_missing_is_installed_for_the_session_alone(
    tmp_path: Path, wheels: Path
):
    words = ["--wheels", str(wheels), "--platform", "cpu", "--output", "with space"]
    session = started(tmp_path, *words)
    printed = session.communicate()[0].splitlines()
    assert session.returncode == 0, printed
    assert "lacks 1 packages" in printed[0]
    run = "-m experiments.gpu.session --platform cpu --output with space"
    assert printed[-2:] == [run, "installed"]
    assert left(tmp_path) == []


def test_a_python_whose_jax_does_not_find_the_card_is_not_used(tmp_path: Path):
    session = started(tmp_path, "--platform=another", "--output", "results")
    printed = session.communicate()[0]
    assert session.returncode == 1
    assert "another" in printed.splitlines()[0]
    assert "experiments.gpu.session" not in printed


def test_a_session_that_is_stopped_may_end_its_parts(tmp_path: Path):
    session = started(tmp_path, "--platform", "cpu", "--wait")
    assert session.stdout is not None
    assert session.stdout.readline() == "up\n"
    session.send_signal(signal.SIGTERM)
    assert session.communicate()[0] == "ended\n"
    assert session.returncode == 7
    assert left(tmp_path) == []
