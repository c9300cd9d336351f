# SPDX-License-Identifier: Apache-2.0
"""Tests pass with any state of the folder of compiled programs; damage costs time."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache

from tests import compiled_cache

ROOT = Path(__file__).parents[1]
TEST = """
import jax, jax.numpy as jnp, warnings

def test_two_programs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax.jit(lambda x: 3 * x)(jnp.float32(14)) == 42
        assert jax.jit(lambda x: x - 2)(jnp.float32(44)) == 42
"""

DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    lambda packed: b"",
    lambda packed: b"garbage",
    lambda packed: packed[:-1],
    lambda packed: packed[:40] + bytes([packed[40] ^ 1]) + packed[41:],
)


def passes(base: Path, tmp_path: Path) -> str:
    """Run a test in a separate process, and return what it prints."""
    test = tmp_path / "test_it.py"
    test.write_text(TEST)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider")]
        + [*("-p", "tests.conftest", "--rootdir", str(ROOT), str(test))],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(base)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def folder(base: Path) -> Path:
    return base / "hetjax-tests" / jax.__version__


def entries(base: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder(base).glob("*-cache")}


def test_damaged_entries_are_made_again(tmp_path: Path):
    base = tmp_path / "cache"
    passes(base, tmp_path)
    whole = entries(base)
    assert len(whole) >= 4
    for (path, packed), damaged in zip(whole.items(), cycle(DAMAGES), strict=False):
        path.write_bytes(damaged(packed))
    passes(base, tmp_path)
    assert entries(base).keys() == whole.keys()
    assert all(map(compiled_cache._is_whole, whole))


@pytest.mark.parametrize("place", ["a file", "read-only", "garbage"])
def test_what_stands_in_the_place_of_the_folder_does_no_harm(
    place: str, tmp_path: Path
):
    base = tmp_path / "cache"
    if place == "a file":
        folder(base).parent.mkdir(parents=True)
        folder(base).write_text("not a folder")
    elif place == "read-only":
        base = Path("/proc/self")  # not even root can write there
    else:
        (folder(base) / "a folder-cache").mkdir(parents=True)
        (folder(base) / "jit_f-cache").write_bytes(os.urandom(100))
    assert ("cannot write" in passes(base, tmp_path)) == (place != "garbage")


def test_entries_that_nothing_has_read_for_two_weeks_go(tmp_path: Path):
    releases = [tmp_path / name for name in ("0.1.0", "0.2.0")]
    for release, age_days in product(releases, (13, 15)):
        release.mkdir(exist_ok=True)
        entry = release / f"{age_days}-cache"
        entry.write_bytes(compilation_cache.compress_executable(b"a program"))
        then = time.time() - age_days * 24 * 3600
        os.utime(entry, (then, then))
    compiled_cache.remove_unusable(releases[0])
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*-*")}
    assert left == {"0.1.0/13-cache", "0.2.0/13-cache"}
