# SPDX-License-Identifier: Apache-2.0
"""A deterministic run tells the compiler so, in whichever process compiles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from hetjax.costs.measured.compiled import write_compiled
from hetjax.models.model import Model
from hetjax.plans.plan_files import plan_json
from hetjax.runtime.execution import compiler_options as options
from hetjax.training import worker
from hetjax.training.layout.compiled_memory import read_run_compiled
from hetjax.training.session import run
from hetjax.training.settings.values import config_values
from tests.training.small import MODEL, ONE_STAGE, SIX, but, losses, small_preset

OPTION = "xla_gpu_deterministic_ops"


def small_model() -> Model:
    return MODEL


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whether each program is compiled as deterministic, with CPUs in place of GPUs."""
    found, compile_ = list[bool](), jax.stages.Lowered.compile

    def noted(self: Any, compiler_options: Any = None, **others: Any) -> Any:
        found.append(OPTION in (compiler_options or {}))
        return compile_(self, compiler_options, **others)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    monkeypatch.setattr(options, "_DETERMINISTIC", {"cpu": {OPTION: True}})
    return found


def test_a_run_in_this_process(tmp_path: Path, compiled: list[bool]):
    preset = but(small_preset(tmp_path, ONE_STAGE), stop_after=2)
    assert run(preset.config, preset, MODEL) == 4
    assert compiled and not any(compiled)
    compiled.clear()
    again = but(preset, run_dir=tmp_path / "again", deterministic=True)
    assert run(again.config, again, MODEL) == 4
    assert compiled and all(compiled)
    assert losses(again.config.run_dir) == losses(preset.config.run_dir)


def test_what_compilers_said_of_other_programs_is_not_taken(tmp_path: Path):
    config = small_preset(tmp_path).config
    config.run_dir.mkdir()
    write_compiled(config.run_dir / "compiled.json", {"program": {"F": 7}})
    assert read_run_compiled(config) == {"program": {"F": 7}}
    assert read_run_compiled(replace(config, deterministic=True)) == {}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_worker_that_compiles_ahead(
    deterministic: bool,
    tmp_path: Path,
    compiled: list[bool],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(worker, "simulate_devices", lambda _: None)  # they exist here
    named = f"{small_model.__module__}:{small_model.__name__}"
    config = replace(
        small_preset(tmp_path).config, model=named, deterministic=deterministic
    )
    settings = {
        "config": config_values(config),
        "cluster": SIX.read_text(),
        "plan": plan_json(ONE_STAGE),
    }
    worker.warm_up("h20-0", settings)
    assert compiled and set(compiled) == {deterministic}
