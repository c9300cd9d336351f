# SPDX-License-Identifier: Apache-2.0
"""Environments that `.ci/run` keeps: made once, and made again when necessary."""

import os
import runpy
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compiled_cache import UNUSED_DAYS

SCRIPT = Path(__file__).parents[1] / ".ci" / "dependencies.py"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1.0"
dependencies = ["lower"]
[project.optional-dependencies]
more = ["upper"]
"""
# the calls of a resolver to a build backend
BACKEND = """
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "project-1.0.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n"
        "Requires-Dist: lower\\nProvides-Extra: more\\n"
        "Requires-Dist: upper; extra == 'more'\\n"
    )
    return info.name
def build_wheel(folder, settings=None, metadata=None):
    raise AssertionError("the project itself is not installed")
"""


class Index:
    """A project and the packages available to it, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "project").mkdir()
        (folder / "project" / "pyproject.toml").write_text(PROJECT)
        (folder / "project" / "backend.py").write_text(BACKEND)
        (folder / "wheels").mkdir()
        self.publish("lower", "1.0")
        self.publish("upper", "1.0")

    def publish(self, name: str, version: str) -> None:
        stem = f"{name}-{version}"
        info = f"{stem}.dist-info"
        path = self.folder / "wheels" / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{info}/RECORD", "")
            wheel.writestr(f"{name}.py", f"version = {version!r}\n")

    def environment(self, requirement: str = ".", over: Path | None = None) -> Path:
        words = [sys.executable, SCRIPT, self.folder / "kept", requirement]
        done = subprocess.run(
            [*words, *([] if over is None else [over])],
            cwd=self.folder / "project",
            env=os.environ
            | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder / "wheels")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def versions(self, environment: Path, *names: str) -> list[str]:
        program = (
            f"import {', '.join(names)}; print({'.version, '.join(names)}.version)"
        )
        done = subprocess.run(
            [environment / "bin" / "python", "-c", program],
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


@pytest.mark.nightly
def test_an_environment_is_made_once_and_again_where_it_must_be(index: Index):
    first = index.environment()
    assert index.versions(first, "lower") == ["1.0"]
    assert index.versions(first, "project") == []

    above = index.environment(".[more]", over=first)
    assert index.versions(above, "lower", "upper") == ["1.0", "1.0"]
    assert not list(above.glob("lib/python*/site-packages/lower.py"))
    made = (above / "pyvenv.cfg").stat().st_mtime_ns
    assert index.environment(".[more]", over=first) == above
    assert (above / "pyvenv.cfg").stat().st_mtime_ns == made

    (upper,) = above.glob("lib/python*/site-packages/upper.py")
    upper.write_text("damaged")
    assert index.environment(".[more]", over=first) == above
    assert index.versions(above, "upper") == ["1.0"]

    index.publish("lower", "2.0")
    then = time.time() - (UNUSED_DAYS + 1) * 24 * 3600
    os.utime(above / "contents", (then, then))
    newer = index.environment()
    assert newer != first and index.versions(newer, "lower") == ["2.0"]
    assert first.exists() and not above.exists()


@pytest.mark.nightly
def test_two_that_need_an_environment_at_once_get_one_that_is_whole(index: Index):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: index.environment(), range(2)))
    assert found[0] == found[1]
    assert index.versions(found[0], "lower") == ["1.0"]
    made = (found[0] / "pyvenv.cfg").stat().st_mtime_ns
    assert index.environment() == found[0]
    assert (found[0] / "pyvenv.cfg").stat().st_mtime_ns == made


def test_certificates_of_an_organisation_damage_nothing_and_other_changes_do(
    tmp_path: Path,
):
    dependencies = runpy.run_path(str(SCRIPT))
    contents, is_whole = dependencies["contents"], dependencies["is_whole"]
    library = tmp_path / "lib" / "certifi"
    library.mkdir(parents=True)
    files = {name: library / name for name in ("cacert.pem", "core.py")}
    for file in files.values():
        file.write_text("as installed")
    (tmp_path / "contents").write_text(contents(tmp_path))
    files["cacert.pem"].write_text("as installed, and one more certificate")
    assert is_whole(tmp_path)
    files["core.py"].write_text("")
    assert not is_whole(tmp_path)
    files["core.py"].write_text("as installed")
    assert is_whole(tmp_path)
    files["cacert.pem"].unlink()
    assert not is_whole(tmp_path)
