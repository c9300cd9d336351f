# SPDX-License-Identifier: Apache-2.0
"""Every program of deterministic stages is compiled as such, and no program of others.

CPUs stand in for GPUs: their compiler accepts the option and ignores it.
"""

import threading
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.runtime.execution import compiler_options as options
from hetjax.runtime.execution.compiler_options import compiler_options
from hetjax.runtime.execution.serving import ServingStages, TextPiece
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.runtime.oracle import random_batch
from tests.runtime.test_compiler_options import mesh_of
from tests.runtime.test_update import MODEL, PLAN, runtime_of

COMPILED = "/jax/core/compile/backend_compile_duration"
OPTION = "xla_gpu_deterministic_ops"  # XLA's name
BATCH = random_batch(PLAN, 128, 0)
# What JAX compiles on a call: programs that count, convert, copy, or add two arrays
BESIDE = {"add", "<lambda>", "convert_element_type"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of all ahead-of-time compilations, with CPUs standing in for GPUs."""
    found, compile_ = list[Any](), jax.stages.Lowered.compile

    def noted(self: Any, compiler_options: Any = None, **others: Any) -> Any:
        found.append(compiler_options or {})
        return compile_(self, compiler_options, **others)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    as_on_gpus = {"cpu": options._DETERMINISTIC["gpu"]}
    monkeypatch.setattr(options, "_DETERMINISTIC", as_on_gpus)
    return found


def trained(runtime: StageRuntime) -> list[Any]:
    """Return the losses after a step, with all that a run does before and after it."""
    runtime.compile()
    runtime.initialise(0)
    runtime.step(0, BATCH)
    losses = runtime.evaluate(0, BATCH)
    runtime.next_logits(0, BATCH[0][0])
    assert all(told.is_finite for told in runtime.numbers(True))
    for state in runtime.stages.values():
        assert state.programs.input_gradient and state.programs.weight_gradient
    return losses


def test_only_gpus_of_a_deterministic_run_are_told():
    for count in (1, 4):
        for platform in ("cpu", "gpu", "tpu"):
            mesh = mesh_of(platform, count)
            found = compiler_options(mesh, deterministic=True)
            assert found.get(OPTION, False) is (platform == "gpu")
            without = compiler_options(mesh, deterministic=False)
            assert OPTION not in without and without.items() <= found.items()


def test_all_programs_of_a_deterministic_training_are(compiled: list[Any]):
    losses = trained(runtime_of(optax.adam(0.1), deterministic=True))
    assert len(compiled) > 30 and all(told[OPTION] for told in compiled)
    compiled.clear()
    assert trained(runtime_of(optax.adam(0.1))) == losses
    assert not any(OPTION in told for told in compiled)


def test_all_programs_of_a_deterministic_model_in_use_are(compiled: list[Any]):
    nodes = {"a": jax.devices()[:2], "b": jax.devices()[2:6]}
    rule = optax.sgd(0.1)
    runtime = ServingStages(PLAN, MODEL, nodes, rule, deterministic=True)
    runtime.restore(lambda entry: np.zeros(entry.shape, entry.dtype))
    runtime.row_losses(0, *BATCH[:2])
    tokens = BATCH[0][0].tolist()
    for start in (0, 4):
        piece = TextPiece(
            tokens=tokens[start : start + 4], last=3, start=start, num_positions=8
        )
        runtime.next_logits(start + 1, piece)
    assert len(compiled) > 5 and all(told[OPTION] for told in compiled)


@pytest.mark.nightly
def test_what_jax_compiles_by_itself_has_one_order(monkeypatch: pytest.MonkeyPatch):
    found, here = set[str](), threading.local()
    compile_ = jax.stages.Lowered.compile

    def ahead(self: Any, *given: Any, **named: Any) -> Any:
        here.is_ahead = True
        try:
            return compile_(self, *given, **named)
        finally:
            here.is_ahead = False

    def note(event: str, duration_secs: float, **more: Any) -> None:
        if event == COMPILED and not getattr(here, "is_ahead", False):
            found.add(more["fun_name"].removeprefix("jit(").removesuffix(")"))

    monkeypatch.setattr(jax.stages.Lowered, "compile", ahead)
    jax.clear_caches()
    runtime = runtime_of(optax.adam(0.1), deterministic=True)
    runtime.initialise(0)  # the host's CPU draws them, wherever the stages are
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        trained(runtime)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert "add" in found and found <= BESIDE
