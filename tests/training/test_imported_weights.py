# SPDX-License-Identifier: Apache-2.0
"""Runs of a model in a Hugging Face folder start with its weights."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetjax.checkpoint.reader import Checkpoint
from hetjax.data.dataset import load
from hetjax.errors import BadInput
from hetjax.export import main as export
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.tensor_names import tensor_parts
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import load_named
from hetjax.train import main
from hetjax.training.directory.rundir import CHECKPOINTS, read_previous
from hetjax.training.run_model import warn_of_other_model
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset, preset
from hetjax.training.worker import training_feed
from tests.models.hugging_face import whole
from tests.training.small import MODEL_CONFIG, but, lines, small_preset

pytestmark = pytest.mark.usefixtures("quick_compiling")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the small plans' model, with weights that no seed gives."""
    rng = np.random.default_rng(0)
    path = tmp_path / "small"
    path.mkdir()
    write_model(
        path,
        MODEL_CONFIG,
        fields_of(MODEL_CONFIG),
        lambda _, shape: rng.normal(0, 0.2, shape).astype(np.float32),
        "float32",
    )
    return path


def of_folder(tmp_path: Path, folder: Path) -> Preset:
    return but(small_preset(tmp_path), model=str(folder), init=str(folder), steps=2)


def test_the_first_loss_is_that_of_the_weights_in_the_folder(
    tmp_path: Path, folder: Path
):
    chosen, model = of_folder(tmp_path, folder), load_named(str(folder))
    assert run(chosen.config, chosen, model) == 0
    previous = read_previous(chosen.config.run_dir)
    assert previous is not None
    feed = training_feed(chosen.config, load(previous.dataset))
    batch = feed.batch(0)
    feed.close()
    params = whole.parameters(model, FolderWeights(folder))
    log_GLV = jax.nn.log_softmax(jnp.asarray(whole.logits(model, params, batch[0])))
    targets = np.asarray(batch[1])[..., None]
    expected = -np.take_along_axis(np.asarray(log_GLV), targets, -1).mean()
    first = lines(chosen.config.run_dir / "metrics.jsonl")
    (loss,) = [
        line["loss"] for line in first if line.get("step") == 1 and "loss" in line
    ]
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_run_is_exported_as_it_was_saved(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
):
    chosen, to = of_folder(tmp_path, folder), tmp_path / "out"
    assert run(chosen.config, chosen, load_named(str(folder))) == 0
    command = [str(chosen.config.run_dir), "--to", str(to)]
    assert export(command) == 0
    assert "step 2 in float32" in capsys.readouterr().out
    saved = Checkpoint.open(chosen.config.run_dir / CHECKPOINTS)
    weights = FolderWeights(to)
    for name, entry in saved.entries.items():
        if name.startswith("params."):
            found = weights(name.removeprefix("params."), entry.shape)
            # rows that pad the vocabulary are unspecified
            rows = MODEL_CONFIG.vocab_size if name.endswith("table") else None
            np.testing.assert_array_equal(found[:rows], saved.read(entry)[:rows])
    began = FolderWeights(folder)("embedding.table", (384, 16))
    assert not np.array_equal(weights("embedding.table", (384, 16)), began)
    ids = json.loads((to / "generation_config.json").read_text())
    words = json.loads((to / "tokenizer.json").read_text())["added_tokens"]
    assert {word["id"]: word["content"] for word in words} == {
        ids["eos_token_id"]: "<|endoftext|>"
    }
    assert export(command) == 2
    assert "which is not an empty folder" in capsys.readouterr().err
    assert export([str(tmp_path), "--to", str(tmp_path / "more")]) == 2
    assert f"no run in {str(tmp_path)!r}" in capsys.readouterr().err


def test_a_folder_is_a_preset_of_its_own(folder: Path):
    config = preset(str(folder)).config
    assert config.model == config.init == str(folder)
    assert config.seq_len == MODEL_CONFIG.max_seq_len
    only_sizes = preset(str(folder / "config.json")).config
    assert only_sizes.init is None and only_sizes.optimizer != config.optimizer


def test_weights_of_another_model_are_refused_before_anything_starts(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "other"
    other.mkdir()
    config = replace(MODEL_CONFIG, inner_size=64)
    zeros = lambda _, shape: np.zeros(shape, np.float32)  # noqa: E731
    write_model(other, config, fields_of(config), zeros, "float32")
    chosen = but(of_folder(tmp_path, folder), init=str(other))
    with pytest.raises(BadInput, match=r"block_000.mlp.down is \[32, 16\]"):
        run(chosen.config, chosen, load_named(str(folder)))
    assert not chosen.config.run_dir.exists()
    assert main([str(tmp_path / "nowhere"), "--steps", "1"]) == 2
    assert "allowed: a folder with a config.json" in capsys.readouterr().err


def test_weights_of_a_model_that_is_alike_in_shape_alone_are_told_of(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
):
    told = json.loads((folder / "config.json").read_text())
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps(told | {"rope_parameters": {"rope_theta": 5e5}}))
    chosen = of_folder(tmp_path, folder).config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_model(chosen)
        longer = {"max_position_embeddings": 4096}
        (tmp_path / "longer.json").write_text(json.dumps(told | longer))
        warn_of_other_model(replace(chosen, model=str(tmp_path / "longer.json")))
    with pytest.warns(UserWarning, match=r"rope_theta 10000.0 \(here 500000.0\)"):
        warn_of_other_model(replace(chosen, model=str(sizes)))
    other = but(of_folder(tmp_path, folder), model=str(sizes))
    assert run(other.config, other, load_named(str(sizes))) == 0
    assert "rope_theta 10000.0 (here 500000.0)" in capfd.readouterr().out


ALL_TENSORS = {
    part.name
    for parts in tensor_parts(MODEL_CONFIG, "llama").values()
    for part in parts
}


def with_index(folder: Path, where: object) -> None:
    """Write an index, and drop the tensor of the last entry from the file."""
    told = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    file = folder / "model.safetensors"
    named = load_file(file)
    del named["lm_head.weight"]
    save_file(named, file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "without model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), "model.safetensors"),
        (
            lambda f: (f / "config.json").write_text(
                json.dumps(fields_of(replace(MODEL_CONFIG, num_blocks=3)))
            ),
            "lacks model.layers.2.",
        ),
        (
            lambda f: with_index(f, {"lm_head.weight": 3}),
            "index.json' without a weight_map",
        ),
        (
            lambda f: with_index(f, ["lm_head.weight"]),
            "index.json' without a weight_map",
        ),
        (
            lambda f: with_index(f, dict.fromkeys(ALL_TENSORS, "model.safetensors")),
            "without lm_head.weight, which model.safetensors.index.json says it has",
        ),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, damage, said: str):
    damage(folder)
    with pytest.raises(BadInput, match=said):
        FolderWeights(folder)


def test_files_stay_in_memory_unless_they_are_let_go_of(folder: Path):
    def is_mapped() -> bool:
        return str(folder) in Path("/proc/self/maps").read_text()

    for lets_go in (False, True):
        weights = FolderWeights(folder, lets_go=lets_go)
        table = weights("embedding.table", (384, 16))
        assert is_mapped() is not lets_go
        again = weights("embedding.table", (384, 16))
        np.testing.assert_array_equal(again, table)
        del weights
        assert not is_mapped()


def test_a_name_on_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Library:
        @staticmethod
        def snapshot_download(name: str, allow_patterns: list[str]) -> str:
            asked.append((name, allow_patterns))
            if name == "no/where":
                raise OSError("cannot be reached\nat all")
            return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Library)
    assert local_folder("owner/model") == tmp_path
    assert asked[0][0] == "owner/model" and "*.safetensors" in asked[0][1]
    assert local_folder(str(tmp_path)) == tmp_path
    said = r"no such folder here, and the hub says: cannot be reached\n"
    with pytest.raises(BadInput, match=said):
        local_folder("no/where")
    with pytest.raises(BadInput, match="which is not a folder"):
        local_folder(str(tmp_path / "none"))
