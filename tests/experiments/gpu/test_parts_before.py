# SPDX-License-Identifier: Apache-2.0
"""Every part of first light runs without an accelerator, and says what it should."""

import json
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from experiments.gpu.first_light import (
    equal_between_processes,
    parser,
    run_all,
    run_part,
)
from experiments.gpu.one_stage import NODE, OneStage, one_stage, other_forms
from hetjax.cluster.cluster import Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_config

pytestmark = pytest.mark.usefixtures("quick_compiling")

SMALL = ["--platform", "cpu", "--model", "tiny", "--seq-len", "32", "--steps", "1"]
SMALL += ["--microbatches", "2", "--matrix-size", "64"]


def told(part: str, *options: str) -> dict[str, Any]:
    """What the part prints, as its reader gets it."""
    with jax.numpy_dtype_promotion("standard"):  # as its processes have it, for optax
        found = run_part(parser().parse_args([part, *SMALL, *options]))
    return json.loads(json.dumps(found))


def test_speed_stands_beside_one_jit_and_beside_what_was_predicted():
    found = told("speed")
    assert found["device"]["kind"] == "cpu"
    assert (found["precision"], found["attention"]) == ("float32", "chunked")
    assert found["tokens_per_step"] == 64
    for way in ("runtime", "plain_jit"):
        figures = found[way]
        assert figures["tokens_per_s"] == pytest.approx(64 / figures["step_s"])
        assert figures["mfu"] > 0 and figures["mfu_of_measured_rate"] > 0
    over = found["predicted_step_s"] / found["runtime"]["step_s"]
    assert found["predicted_over_measured_step"] == pytest.approx(over)


def test_memory_is_predicted_with_and_without_the_compiler_and_held_against_a_peak(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("experiments.gpu.speed._peak_bytes", lambda device: 1 << 20)
    memory = told("speed")["memory"]
    by_model, by_compiler = (
        memory["bytes"][name] for name in ("predicted", "predicted_once_compiled")
    )
    assert sum(memory["parts"].values()) == by_model
    workspace = memory["compiled_temp_bytes"]["FB"]
    assert by_model - memory["parts"]["workspace"] == by_compiler - workspace
    assert memory["over_measured"]["predicted"] == by_model / (1 << 20)


def test_a_step_that_is_taken_again_is_the_same_to_the_bit():
    found = told("repeats", "--dtype", "float16")
    assert found["precision"] == "float16"
    assert found["bit_equal"] and found["differ"] == []
    assert found["gradient_error_by_attention"].keys() == {"chunked", "xla"}
    assert found["within_bound"]


def test_digests_of_two_processes_are_compared():
    same, other = {"digest": "a"}, {"digest": "b"}
    assert equal_between_processes([{"error": "none"}, same]) is None
    assert equal_between_processes([same, same]) is True
    assert equal_between_processes([same, other]) is False


def test_a_stage_on_another_kind_of_device_has_the_gradients_of_the_cpu():
    assert told("mixed")["largest_relative_gradient_error"] < 1e-5


def test_all_parts_are_processes_of_which_one_may_fail(tmp_path: Path):
    output = tmp_path / "first_light.json"
    run_all(["--platform", "cpu"], output, parts=["transfer", "pull"])
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["command"].endswith("experiments.gpu.first_light --platform cpu")
    works, fails = result["parts"]
    assert works["part"] == "transfer" and works["works"]
    assert len(works["bytes_per_s"]) == 3
    assert "Error" in fails["error"]


def on(device: str, model: str = "llama-1b") -> OneStage:
    node = Node(name=NODE, device=device, count=1)
    return one_stage(model_config(model), node, microbatches=8, size=1)


@pytest.mark.parametrize(
    ("device", "precision", "attention"),
    [
        ("V100-SXM2-32GB", "float16", "chunked"),
        ("T4", "float16", "chunked"),
        ("A100-SXM4-80GB", "bfloat16", "cudnn"),
        ("H100-SXM5-80GB", "bfloat16", "cudnn"),
        ("TPU-v5e", "bfloat16", "splash"),
    ],
)
def test_a_card_computes_in_what_the_product_would_choose_there(
    device: str, precision: str, attention: str
):
    of = on(device)
    assert (of.precision, of.stage.attention) == (precision, attention)
    assert (of.loss_scale is None) == (precision != "float16")
    assert len(other_forms(of.stage.attention)) == (1 if attention == "chunked" else 2)


def test_a_card_that_cannot_hold_the_model_is_told_before_a_step():
    with pytest.raises(NoFeasiblePlan):
        on("T4", "llama2-7b").predicted(optax.adamw(1e-4))
