# SPDX-License-Identifier: Apache-2.0
"""Fixtures of runs on workers: data, compiled programs, and an undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from hetjax.train import main
from tests import jax_settings
from tests.training.pair import training
from tests.training.test_workers import losses, set_environment


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compile quickly; their rounding differs from this process's."""
    set_environment(monkeypatch)


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    """The effect of `quick_compiling`, also for module-scoped fixtures."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile)
        jax_settings.compile_quickly()
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for runs' data and compiled programs, shared by all tests."""
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[float]:
    """The losses of an undisturbed run on two nodes."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        assert main(training(run_dir, cache)) == 0
    return losses(run_dir)
