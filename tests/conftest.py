# SPDX-License-Identifier: Apache-2.0
"""Every test sees 16 simulated CPU devices and the strictest JAX."""

import atexit
import ctypes
import gc
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from hetjax.files.user_cache import user_cache
from hetjax.runtime.execution import stages
from tests import compiled_cache, jax_settings
from tests.checkpoint.fake_gcs import FakeGcs
from tests.checkpoint.fake_s3 import ENVIRONMENT, FakeS3

pytest_plugins = ["tests.short_runs", "tests.one_process"]
COMPILED = pytest.StashKey[Path]()
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 20_000
PAGES, MOST_BYTES = Path("/proc/self/statm"), 3 << 30

jax_settings.strict_simulation()
# JAX reads its flags now: some tests set others for processes that they start
assert jax.device_count() == jax_settings.NUM_DEVICES


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Drop compiled programs when they take too many mappings or too much memory.

    Linux allows a process 65,530 mappings, and CPU programs use some thousands per test
    file. glibc keeps memory that JAX's hundred threads have freed, gigabytes in a full
    run, until it is asked to return it.
    """
    yield
    if not MAPPINGS.exists():  # not Linux
        return
    mappings = len(MAPPINGS.read_bytes().splitlines())
    resident_bytes = int(PAGES.read_text().split()[1]) * resource.getpagesize()
    if mappings > MOST_MAPPINGS or resident_bytes > MOST_BYTES:
        for shared in (stages._shared, stages._shared_updates, stages._shared_checks):
            shared.cache_clear()
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
            trim(0)


@pytest.fixture(autouse=True)
def nothing_learnt() -> None:
    """Discard what other tests' runs have measured, which would change predictions."""
    shutil.rmtree(user_cache("calibration"), ignore_errors=True)


@pytest.fixture
def quick_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile ahead of time in a third of the time, for tests that allow rounding."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile)
    jax_settings.compile_quickly()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    """A cloud on loopback that the client library uses."""
    with FakeGcs("bucket").serving() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """An S3 server on loopback, with credentials in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with FakeS3("bucket").serving() as server:
        yield server


def pytest_configure(config: pytest.Config) -> None:
    """Let all test processes and their children share what they compile.

    Program, options and release of JAX identify an entry. Python keeps its bytecode
    too, or each process would compile all that it imports: an eighth of a start.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # compiling makes many long-lived objects
    config.stash[COMPILED] = _compiled_folder(config)
    jax_settings.keep_compiled(config.stash[COMPILED])
    _leave_the_users_cache_alone()


def _leave_the_users_cache_alone() -> None:
    """Let all processes started here use an empty cache instead of the user's.

    Except for lists of fonts and downloaded packages, which take long to get.
    """
    for name, kept in {"MPLCONFIGDIR": "matplotlib", "PIP_CACHE_DIR": "pip"}.items():
        os.environ.setdefault(name, str(compiled_cache.cache_root() / kept))
    folder = tempfile.mkdtemp(prefix="hetjax-tests-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = folder


def _compiled_folder(config: pytest.Config) -> Path:
    """Return the folder that the process which starts the others found and cleaned."""
    found = getattr(config, "workerinput", {}).get("compiled_folder")
    if found is not None:
        return Path(found)
    folder = compiled_cache.compiled_folder()
    compiled_cache.remove_unusable(folder)
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["compiled_folder"] = str(node.config.stash[COMPILED])


def pytest_report_header(config: pytest.Config) -> str:
    return f"compiled programs: {config.stash[COMPILED]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plans", type=int, help="random plans to hold against one jit")
    parser.addoption("--island-plans", type=int, help="of them over worker processes")
    parser.addoption(
        "--install",
        action="store_true",
        help="also install the wheel over what Colab has; downloads 700 MB",
    )
