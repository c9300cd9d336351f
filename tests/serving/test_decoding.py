# SPDX-License-Identifier: Apache-2.0
"""Token-by-token decoding gives the logits of one pass over the whole text."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.configs import GPTConfig, LlamaConfig, Routing
from hetjax.models.decoders import model_of
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.model import Layer, Model, ModuleSpec
from hetjax.models.named import load_named
from hetjax.serving.decoding import LENGTHS, Continuation
from hetjax.serving.loaded_model import LoadedModel, load_layers
from tests.models.hugging_face import whole
from tests.models.hugging_face.test_fixtures import FOLDERS
from tests.serving.model_folder import drawn
from tests.short_runs import draws

LLAMA = LlamaConfig(
    name="windowed",
    vocab_size=37,
    vocab_multiple=8,
    hidden_size=16,
    inner_size=24,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=600,
    window=70,
    windowed=(True, False),
)


def loaded(model: Model, weights: whole.Weights = drawn) -> LoadedModel:
    return load_layers(model, weights, np.dtype(np.float32), jax.local_devices())


def step_by_step(
    of: LoadedModel, tokens_L: np.ndarray, num_given: int, room: int
) -> np.ndarray:
    """Return logits_LV after `num_given` tokens at once, then after each later one."""
    text = Continuation(of, room)
    found = [text.prefill(tokens_L[:num_given].tolist())]
    found += [text.decode(int(token)) for token in tokens_L[num_given:]]
    return np.stack(found)


def some_tokens(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 37, number, np.int32)


@pytest.mark.parametrize("folder", draws(FOLDERS, short=5), ids=lambda f: f.name)
def test_each_family_goes_on_as_it_reads_the_whole_text(folder: Path):
    model, weights = load_named(str(folder)), FolderWeights(folder)
    length = min(model.max_seq_len, 40)  # windows have 4 and 5
    tokens_L, use = some_tokens(length), loaded(model, weights)
    params = whole.parameters(model, weights)
    expected_LV = whole.logits(model, params, tokens_L[None])[0]
    for num_given in (1, 15, 16, 17, length):
        found_LV = step_by_step(use, tokens_L, num_given, length)
        np.testing.assert_allclose(found_LV, expected_LV[num_given - 1 :], atol=1e-4)


@pytest.mark.parametrize("num_given", [63, 64, 65, 255, 256, 257, 300])
def test_prompts_about_as_long_as_what_programs_take_at_once(num_given: int):
    model, tokens_L = model_of(LLAMA), some_tokens(301)
    assert {64, 256} <= {*LENGTHS}
    params = whole.parameters(model, drawn)
    expected_LV = whole.logits(model, params, tokens_L[None])[0]
    found_LV = step_by_step(loaded(model), tokens_L[: num_given + 1], num_given, 301)
    wanted_LV = expected_LV[num_given - 1 : num_given + 1]
    np.testing.assert_allclose(found_LV, wanted_LV, atol=1e-4)


def test_learnt_positions_are_right_up_to_the_last():
    config = GPTConfig(
        name="gpt",
        vocab_size=37,
        hidden_size=16,
        num_blocks=1,
        num_heads=2,
        max_seq_len=70,
    )
    model, tokens_L = model_of(config), some_tokens(70)
    expected_LV = whole.logits(model, whole.parameters(model, drawn), tokens_L[None])[0]
    found_LV = step_by_step(loaded(model), tokens_L, 67, 70)
    np.testing.assert_allclose(found_LV, expected_LV[66:], atol=1e-4)


def test_experts_that_had_a_capacity_turn_no_token_away():
    tight = Routing(
        num_experts=4, top_k=2, capacity_factor=0.5, balance_coefficient=0.01
    )
    config = replace(LLAMA, routing=tight)
    free = model_of(replace(config, routing=replace(tight, capacity_factor=None)))
    tokens_L, params = some_tokens(30), whole.parameters(free, drawn)
    expected_LV = whole.logits(free, params, tokens_L[None])[0]
    found_LV = step_by_step(loaded(model_of(config)), tokens_L, 20, 30)
    np.testing.assert_allclose(found_LV, expected_LV[19:], atol=1e-4)
    dropped_LV = whole.logits(model_of(config), params, tokens_L[None])[0]
    assert np.abs(dropped_LV - expected_LV).max() > 1e-2


@pytest.mark.parametrize("tied", [False, True])
def test_layers_on_several_devices_give_the_same(tied: bool):
    model, tokens_L = model_of(replace(LLAMA, tied=tied)), some_tokens(20)
    devices = jax.local_devices()[:3]
    free_bytes = [12_000.0, 16_000.0, 9_000.0]
    spread = load_layers(model, drawn, np.dtype(np.float32), devices, free_bytes)
    assert len(spread.devices) == 3 and spread.devices[0] == devices[1]
    for layer in spread.layers:
        placed = {d for value in jax.tree.leaves(layer.params) for d in value.devices()}
        assert placed == {layer.device}
    found_LV = step_by_step(spread, tokens_L, 10, 20)
    np.testing.assert_array_equal(
        found_LV, step_by_step(loaded(model), tokens_L, 10, 20)
    )


@dataclass(frozen=True)
class _Size:
    size: int


class _Mean(nnx.Module):
    """A module that uses all positions and has no form for decoding."""

    def __init__(self, config: _Size, *, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones((config.size,)), logical=(None,))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD + jnp.mean(x_BLD, axis=1, keepdims=True)


def test_a_module_that_does_not_say_how_it_goes_on_is_refused():
    first, *_, last = model_of(LLAMA).layers
    own = Layer("block", (ModuleSpec("block.mean", _Mean, _Size(16)),))
    model = Model("own", (first, own, last), vocab_size=37, max_seq_len=64)
    with pytest.raises(BadInput, match="_Mean.*\n.*PositionWise") as refused:
        Continuation(loaded(model), 5)
    assert refused.value.fix
