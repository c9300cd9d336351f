# SPDX-License-Identifier: Apache-2.0
"""Generated texts, and scores, against transformers itself."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from hetjax.serving.decoding import Continuation
from hetjax.serving.generation import generated
from hetjax.serving.loaded_model import LoadedModel, load_layers
from hetjax.serving.sampling import Sampling
from hetjax.serving.scoring import token_log_likelihoods
from tests.against_transformers.families import CONFIGS, random_model, random_tokens

_NUM_TOKENS = 14  # after 17 others: past every window, up to GPT-2's last position


def loaded(model, folder: Path) -> LoadedModel:
    model.save_pretrained(folder)
    ours = load_named(str(folder))
    weights = FolderWeights(folder)
    return load_layers(ours, weights, np.dtype(np.float32), jax.local_devices())


@pytest.mark.parametrize("family", CONFIGS)
def test_the_likeliest_tokens_are_those_of_generate(family: str, tmp_path: Path):
    model = random_model(family, seed=3)
    ours = loaded(model, tmp_path)
    for prompt_L in random_tokens(3):
        for length in (1, 16, 17):
            given = torch.from_numpy(prompt_L[None, :length].astype(np.int64))
            theirs_L = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=_NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )[0, length:]
            found = generated(
                partial(Continuation, ours),
                ours.model.max_seq_len,
                prompt_L[:length].tolist(),
                _NUM_TOKENS,
                Sampling(temperature=0),
                num_words=37,
            )
            assert [*found] == theirs_L.tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_log_likelihoods_are_those_of_transformers(family: str, tmp_path: Path):
    model, tokens_BL = random_model(family, seed=4), random_tokens(4)
    ours = loaded(model, tmp_path)
    found_BL = token_log_likelihoods(ours, tokens_BL[:, :-1], tokens_BL[:, 1:])
    given = torch.from_numpy(tokens_BL.astype(np.int64))
    with torch.no_grad():
        log_BLV = torch.log_softmax(model(given).logits, -1)
    theirs_BL = torch.take_along_dim(log_BLV[:, :-1], given[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(found_BL, theirs_BL.numpy(), atol=1e-4)
