# SPDX-License-Identifier: Apache-2.0
"""Every test sees 16 simulated CPU devices and the strictest JAX."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from hetjax.runtime.execution import stages
from tests import jax_settings
from tests.checkpoint.fake_gcs import FakeGcs

MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 20_000

jax_settings.strict_simulation()
# JAX reads its flags now: some tests set others for the processes that they start
assert jax.device_count() == jax_settings.NUM_DEVICES

hypothesis.settings.register_profile("hetjax", deadline=None)
hypothesis.settings.load_profile("hetjax")


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """What is compiled goes before a process has too many of the system's mappings.

    It may have 65,530, and programs for CPUs have some thousands per file of tests.
    """
    yield
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MOST_MAPPINGS:
        for shared in (stages._shared, stages._shared_updates, stages._shared_checks):
            shared.cache_clear()
        jax.clear_caches()


@pytest.fixture
def quick_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile ahead of time in a third of the time, for tests that allow rounding."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile)
    jax_settings.compile_quickly()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    """A cloud on loopback that the client library talks to."""
    with FakeGcs("bucket").serving() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server


def pytest_configure(config: pytest.Config) -> None:
    """Both test processes and all that they start keep what they compile for others.

    Entries are told apart by program, options and release of JAX. So does Python, whose
    processes otherwise each compile all that they import: an eighth of a start.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # compiling makes much that lives long
    cache = getattr(config, "cache", None)
    if cache is not None:
        jax_settings.keep_compiled(cache.mkdir("compiled"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plans", type=int, default=24, help="random plans to hold against one jit"
    )
    parser.addoption(
        "--island-plans", type=int, default=4, help="of them over worker processes"
    )
    parser.addoption(
        "--bound-requests",
        type=int,
        default=20,
        help="requests whose bound is held against plans that come near it",
    )
    parser.addoption(
        "--install",
        action="store_true",
        help="also install the wheel over what Colab has; downloads 700 MB",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Keep tests that share compiled programs on one worker (`--dist loadgroup`).

    Random plans and requests share nothing: they go last, one by one, to whoever is
    free.
    """
    num_requests: Any = config.getoption("bound_requests")
    left_out = [item for item in items if _bound_request(item) >= num_requests]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=_is_random)
    for item in items:
        if not _is_random(item):
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _bound_request(item: pytest.Item) -> int:
    """Which of the random requests is held against its bound; of other tests -1."""
    call = getattr(item, "callspec", None)
    return -1 if call is None else call.params.get("bound_request", -1)


def _group(item: pytest.Item) -> str:
    """Those of training share programs: in this process, or on disk for workers."""
    room = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    if room != "training":
        return item.path.name
    on_workers = "environment" in getattr(item, "fixturenames", ())
    return "training on workers" if on_workers else room


def _is_random(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return "plan_seed" in names or "bound_request" in names
