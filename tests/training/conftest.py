# SPDX-License-Identifier: Apache-2.0
"""What runs on workers share: data, compiled programs, and how the run should go."""

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
    """Workers compile quickly; they round otherwise than this process."""
    set_environment(monkeypatch)


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    """As `quick_compiling`, also for what the tests of a file share."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile)
        jax_settings.compile_quickly()
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs keep data and compiled programs; one compiles for all."""
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[float]:
    """What a run on two nodes tells where nothing happens."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        assert main(training(run_dir, cache)) == 0
    return losses(run_dir)
