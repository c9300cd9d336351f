# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a file is used, compared by value, named once, or refused by name."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetjax.errors import BadInput
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.stored_tensors import INDEX, WHOLE
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import load_named
from tests.models.hugging_face.test_fixtures import FIXTURES
from tests.models.hugging_face.whole import logits, parameters

HEAD, Named = "lm_head.weight", dict[str, np.ndarray]
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())


def copied(family: str, to: Path, change: Callable[[Named], Mapping | None]) -> Path:
    """Copy a fixture's folder with other tensors, which `change` returns or changes."""
    shutil.copytree(FIXTURES / family, to)
    tensors = load_file(to / WHOLE)
    save_file(dict(change(tensors) or tensors), to / WHOLE)
    return to


def with_fields(folder: Path, **fields: object) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | fields))


def our_logits(folder: Path) -> np.ndarray:
    model, weights = load_named(str(folder)), FolderWeights(folder)
    weights.check_model(model)
    tokens_BL = np.load(FIXTURES / "llama2" / "tokens.npy")
    return logits(model, parameters(model, weights), tokens_BL)


def embedding(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    (found,) = (
        v
        for n, v in tensors.items()
        if n.endswith(("embed_tokens.weight", "wte.weight"))
    )
    return found


def with_head(factor: float) -> Callable[[Named], Mapping]:
    return lambda tensors: {**tensors, HEAD: factor * embedding(tensors)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_from_its_embedding_is_its_own(family: str, tmp_path: Path):
    """Logits are linear in the head: twice the embedding gives twice the logits."""
    equal = copied(family, tmp_path / "equal", with_head(1.0))
    twice = copied(family, tmp_path / "twice", with_head(2.0))
    for folder in (equal, twice):
        with_fields(folder, tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*_pdrop of its config.json")
        expected_BLV = our_logits(equal)
    assert "head.table" not in FolderWeights(equal)._parts
    with pytest.warns(UserWarning, match="lm_head.weight differs from the embedding"):
        found_BLV = our_logits(twice)
    np.testing.assert_allclose(found_BLV, 2 * expected_BLV, rtol=1e-4, atol=1e-4)
    config, fields = read_config(twice)
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", config, fields, FolderWeights(twice), "float32")
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["tie_word_embeddings"] is False
    before, after = (load_file(f / WHOLE) for f in (twice, tmp_path / "out"))
    np.testing.assert_array_equal(after[HEAD], before[HEAD])


def test_a_head_is_compared_by_value_in_any_precision_and_anew_when_it_changes(
    tmp_path: Path,
):
    def in_half(tensors: Named) -> Mapping:
        rounded = {n: v.astype(ml_dtypes.bfloat16) for n, v in tensors.items()}
        return {**rounded, HEAD: embedding(rounded).astype(np.float32)}

    folder = copied("qwen2", tmp_path / "in", in_half)
    assert read_config(folder)[0].tied
    tensors = load_file(folder / WHOLE)
    tensors[HEAD][-1, -1] += 1e-3  # the last value of all
    save_file(tensors, folder / WHOLE)
    with pytest.warns(UserWarning, match="not tied"):
        assert not read_config(folder)[0].tied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not read_config(folder)[0].tied  # one warning suffices
    tensors[HEAD] = tensors[HEAD][:-1]  # a head with a row less is not equal either
    save_file(tensors, folder / WHOLE)
    with pytest.raises(BadInput, match="lm_head.weight of shape"):
        FolderWeights(folder)


def test_a_head_that_a_model_does_not_have_is_refused(tmp_path: Path):
    folder = copied("llama3", tmp_path / "in", with_head(2.0))
    tied = load_named(str(FIXTURES / "llama3"))
    with pytest.warns(UserWarning):
        weights = FolderWeights(folder)
    with pytest.raises(BadInput, match="whose head.table is missing; the folder's"):
        weights.check_model(tied)


def block(family: str) -> str:
    return "transformer.h.0" if family == "gpt2" else "model.layers.0"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    [
        "{block}.attn.masked_bias",  # zero, which hides nothing
        "{block}.attn.bias",
        "{block}.self_attn.o_proj.bias",
        "{block}.self_attn.q_proj.lora_A.weight",
        "{block}.mlp.shared_expert_gate.weight",
        "{next}.input_layernorm.weight",
        "lm_head.bias",
        "v_head.summary.weight",
        "model.mtp.0.norm.weight",
    ],
)
def test_a_tensor_that_nobody_asks_for_is_refused_by_name(
    family: str, name: str, tmp_path: Path
):
    name = name.format(block=block(family), next=block(family).replace("0", "9"))
    zeros = np.zeros((4, 4), np.float32)
    folder = copied(family, tmp_path / "in", lambda tensors: {**tensors, name: zeros})
    with pytest.raises(BadInput) as error:
        FolderWeights(folder)
    assert name in error.value.got and "config.json" in error.value.fix


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma3"])
def test_a_tower_for_images_is_refused_in_a_family_of_text(family: str, tmp_path: Path):
    tower = {"vision_tower.a.weight": np.ones(4, np.float32)}
    folder = copied(family, tmp_path / "in", lambda tensors: tensors | tower)
    with pytest.raises(BadInput, match="vision_tower.a.weight"):
        FolderWeights(folder)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_tower_for_images_is_named_and_left_out(prefix: str, tmp_path: Path):
    tower = {
        f"{prefix}{name}.weight": np.ones(4, np.float32)
        for name in ("vision_tower.a", "multi_modal_projector.b")
    }
    folder = copied("gemma3", tmp_path / "in", lambda tensors: tensors | tower)
    with pytest.warns(UserWarning, match="2 tensors of the vision part are ignored"):
        FolderWeights(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.bool_])
def test_masks_of_gpt2_are_compared_by_value(dtype: type, tmp_path: Path):
    mask = np.tri(32)[None, None].astype(dtype)
    least = np.array(-1e4, np.float32)
    both = {"transformer.h.0.attn.bias": mask, "h.1.attn.masked_bias": least}
    FolderWeights(copied("gpt2", tmp_path / "in", lambda tensors: tensors | both))
    seeing = {"h.0.attn.bias": np.ones_like(mask)}  # later positions, too
    folder = copied("gpt2", tmp_path / "other", lambda tensors: tensors | seeing)
    with pytest.raises(BadInput, match="transformer.h.0.attn.bias"):
        FolderWeights(folder)


@pytest.mark.parametrize(
    ("family", "theta", "factor"),
    [("llama2", 1e4, 1), ("qwen3", 1e6, 1), ("gemma3", 1e6, 8), ("gemma3", 1e4, 1)],
)
def test_rotations_of_old_files_are_compared_by_value(
    family: str, theta: float, factor: float, tmp_path: Path
):
    size = 4 if family == "llama2" else 8
    rotation = theta ** (-np.arange(0, size, 2) / size) / factor
    for dtype in (np.float32, ml_dtypes.bfloat16):
        name = "model.layers.1.self_attn.rotary_emb.inv_freq"
        own = {name: rotation.astype(dtype)}
        folder = tmp_path / np.dtype(dtype).name
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            FolderWeights(copied(family, folder, lambda tensors, o=own: tensors | o))
    other = {"model.rotary_emb.inv_freq": (0.9 * rotation).astype(np.float32)}
    folder = copied(family, tmp_path / "other", lambda tensors: tensors | other)
    with pytest.warns(UserWarning, match="inv_freq differs from what rope_theta"):
        FolderWeights(folder)


def sharded(folder: Path, files: Mapping[str, Named], named: Mapping[str, str]) -> None:
    (folder / WHOLE).unlink()
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_a_tensor_in_two_files_is_compared_by_value(difference: float, tmp_path: Path):
    """Even if the index names it in only one of them."""
    folder = copied("llama2", tmp_path / "in", lambda tensors: tensors)
    tensors = load_file(folder / WHOLE)
    norm = "model.norm.weight"
    second = {norm: tensors[norm] + np.float32(difference), HEAD: tensors.pop(HEAD)}
    index = dict.fromkeys(tensors, "a.safetensors") | {HEAD: "b.safetensors"}
    sharded(folder, {"a.safetensors": tensors, "b.safetensors": second}, index)
    if difference:
        with pytest.raises(BadInput, match=f"{norm} in a.safetensors and a different"):
            FolderWeights(folder)
        return
    FolderWeights(folder)


def test_a_tensor_that_the_index_does_not_name_is_not_dropped(tmp_path: Path):
    folder = copied("llama3", tmp_path / "in", with_head(2.0))
    tensors = load_file(folder / WHOLE)
    index = dict.fromkeys(tensors.keys() - {HEAD}, "a.safetensors")
    sharded(folder, {"a.safetensors": tensors}, index)
    with pytest.warns(UserWarning, match="not tied"):
        assert not read_config(folder)[0].tied


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_their_prefix_are_the_same_and_twice_if_equal(
    family: str, tmp_path: Path
):
    prefix = "transformer." if family == "gpt2" else "model."
    bare = copied(
        family,
        tmp_path / "bare",
        lambda tensors: {n.removeprefix(prefix): v for n, v in tensors.items()},
    )
    np.testing.assert_array_equal(our_logits(bare), our_logits(FIXTURES / family))

    def twice(by: float) -> Callable[[Named], Mapping]:
        name = "ln_f.weight" if family == "gpt2" else "norm.weight"
        return lambda tensors: {
            **tensors,
            name: tensors[prefix + name] + np.float32(by),
        }

    FolderWeights(copied(family, tmp_path / "twice", twice(0.0)))
    with pytest.raises(BadInput, match="a different"):
        FolderWeights(copied(family, tmp_path / "unlike", twice(1.0)))
