# SPDX-License-Identifier: Apache-2.0
"""Folders with quantised weights are refused by the name of their method."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetjax.errors import BadInput
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.stored_tensors import WHOLE
from hetjax.models.hugging_face.tensors import FolderWeights
from tests.models.hugging_face.test_fixtures import FIXTURES
from tests.models.hugging_face.test_surplus import with_fields

Q = "model.layers.0.self_attn.q_proj."
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
# what each method's folders hold in place of a weight, and their config of it
METHODS = {
    "bitsandbytes (4 bits)": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        [f"{Q}weight.absmax", f"{Q}weight.quant_state.bitsandbytes__nf4"],
    ),
    "bitsandbytes (8 bits)": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        [f"{Q}SCB"],
    ),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, [f"{Q}qweight", f"{Q}g_idx"]),
    "AWQ": ({"quant_method": "awq", "bits": 4}, [f"{Q}qweight", f"{Q}qzeros"]),
    "FP8": ({"quant_method": "fp8"}, [f"{Q}weight_scale_inv"]),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors"},
        [f"{Q}weight_packed", f"{Q}weight_shape"],
    ),
    "MXFP4": ({"quant_method": "mxfp4"}, [f"{EXPERTS}_blocks", f"{EXPERTS}_scales"]),
    "'hqq'": ({"quant_method": "hqq"}, []),
}


def check_named(error: BadInput, method: str) -> None:
    assert f"quantised with {method}" in error.got
    assert "--lora.frozen nf4" in error.fix


@pytest.mark.parametrize("method", METHODS)
def test_the_config_names_the_method(method: str, tmp_path: Path):
    shutil.copytree(FIXTURES / "llama2", tmp_path / "in")
    with_fields(tmp_path / "in", quantization_config=METHODS[method][0])
    with pytest.raises(BadInput) as error:
        read_config(tmp_path / "in")
    check_named(error.value, method)


@pytest.mark.parametrize("method", [m for m, (_, names) in METHODS.items() if names])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_tensors_name_the_method_where_the_config_does_not(
    method: str, is_in_place: bool, tmp_path: Path
):
    shutil.copytree(FIXTURES / "llama2", tmp_path / "in")
    file = tmp_path / "in" / WHOLE
    tensors = load_file(file)
    if is_in_place:
        del tensors[f"{Q}weight"]
    codes = np.zeros((2, 2), np.uint8)
    save_file(tensors | dict.fromkeys(METHODS[method][1], codes), file)
    with pytest.raises(BadInput) as error:
        FolderWeights(tmp_path / "in")
    check_named(error.value, method.partition(" ")[0])


def test_sizes_alone_are_read_and_written_without_a_method(tmp_path: Path):
    shutil.copytree(FIXTURES / "llama2", tmp_path / "in")
    expected = read_config(tmp_path / "in")
    with_fields(tmp_path / "in", quantization_config=METHODS["FP8"][0])
    (tmp_path / "in" / WHOLE).unlink()
    for path in (tmp_path / "in", tmp_path / "in" / "config.json"):
        assert read_config(path) == expected
    (tmp_path / "in").rename(tmp_path / "other")
    with pytest.warns(UserWarning, match="'other': quantization_config is ignored"):
        read_config(tmp_path / "other")
