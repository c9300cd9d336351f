# SPDX-License-Identifier: Apache-2.0
"""Which programs are compiled with options, and that stage programs have them.

`tests/experiments/test_tpu_compiler.py` tests the effect of the options.
"""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hetjax.plans.plan import StageMesh
from hetjax.runtime.execution import compiler_options as options
from hetjax.runtime.execution.stages import Stages
from tests.costs.small_models import family, pipeline


def mesh_of(platform: str, count: int, kind: str = "any") -> Any:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    devices = [device for _ in range(count)]
    return SimpleNamespace(devices=np.array(devices, dtype=object).reshape(1, -1))


def test_options_are_of_the_platform_and_of_several_devices():
    assert options.compiler_options(mesh_of("cpu", 4), deterministic=False) == {}
    assert options.compiler_options(mesh_of("gpu", 1), deterministic=False) == {}
    assert options.compiler_options(mesh_of("tpu", 1), deterministic=False) == {}
    on_gpus = options.compiler_options(mesh_of("gpu", 2), deterministic=False)
    on_tpus = options.compiler_options(mesh_of("tpu", 2), deterministic=False)
    assert on_gpus and all(name.startswith("xla_gpu_") for name in on_gpus)
    assert on_tpus and not any(name.startswith("xla_gpu_") for name in on_tpus)


def test_fused_all_reduces_are_for_tpus_with_the_memory_for_them():
    newer, older = (mesh_of("tpu", 2, f"TPU {name}") for name in ("v5", "v4"))
    more = set(options.compiler_options(newer, deterministic=False)) - set(
        options.compiler_options(older, deterministic=False)
    )
    assert [name.rpartition("_fusion_")[2] for name in more] == ["fuse_all_reduce"]


@pytest.mark.parametrize("name", ["forward", "fused", "evaluate", "copies"])
def test_programs_are_compiled_with_the_options_of_their_platform(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    model = family("llama")
    plan = pipeline(model, (0, 6), mesh=StageMesh(tensor=2))
    devices = {"n": jax.devices()[-2:]}  # no other test has compiled for these
    stages = Stages(plan, model, devices, optax.sgd(0.1), dtype="bfloat16")
    state = stages.stages[0, 0]
    monkeypatch.setattr(options, "_OPTIONS", {"cpu": {"xla_no_such_option": True}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        getattr(state.updates if name == "copies" else state.programs, name)
