# SPDX-License-Identifier: Apache-2.0
"""What was read from a transformers folder is written unchanged."""

import json
import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig, Routing
from hetjax.models.hugging_face import tensor_file, written
from hetjax.models.hugging_face.configs import config_of, read_config
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.stored_tensors import INDEX
from hetjax.models.hugging_face.tensor_names import tensor_parts
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import DTYPES, write_model
from tests.models.hugging_face.test_fixtures import FIXTURES


def all_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda f: f.name)
def test_weights_come_out_as_they_went_in_bit_by_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(written, "FILE_BYTES", 10_000)  # several files
    monkeypatch.setattr(tensor_file, "_ROWS_BYTES", 1000)  # tensors in several pieces
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    before = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in all_tensors(folder).items()
    }
    save_file(before, source / "model.safetensors")
    (source / "config.json").write_text((folder / "config.json").read_text())
    config, fields = read_config(source)
    write_model(target, config, fields, FolderWeights(source), "bfloat16")
    after = all_tensors(target)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    index = json.loads((target / INDEX).read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in before.values())
    assert read_config(target)[0] == config_of(fields, "out")


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda f: f.name)
def test_the_fields_that_we_write_say_the_same_model(folder: Path):
    config, _ = read_config(folder)
    assert config_of(fields_of(config), config.name) == config


_SIZES: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=256, num_blocks=3, num_heads=4
)
_LLAMA = LlamaConfig(
    name="dense", inner_size=1024, num_kv_heads=4, max_seq_len=16, **_SIZES
)
_EXPERTS = replace(_LLAMA, routing=Routing(num_experts=8, top_k=2))
_GPT = GPTConfig(name="gpt", max_seq_len=16, **_SIZES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [_LLAMA, _EXPERTS, _GPT])
def test_writing_holds_less_than_two_layers_as_they_are_written(
    config: DecoderConfig, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tensor_file, "_ROWS_BYTES", 2**16)  # these layers are small
    fields = fields_of(config)

    def zeros(_: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape, DTYPES[dtype])

    tensor_parts(config, fields["model_type"])  # caches the shapes
    tracemalloc.start()
    write_model(tmp_path, config, fields, zeros, dtype)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    layers: Counter[str] = Counter()
    for name, value in all_tensors(tmp_path).items():
        layers["".join(re.findall(r"\.\d+\.", name)[:1]) or name] += value.nbytes
    assert peak_bytes < 2 * max(layers.values())
