# SPDX-License-Identifier: Apache-2.0
"""Models that transformers saved give the logits that transformers gave for them."""

from pathlib import Path

import numpy as np
import pytest

from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from tests.models.hugging_face.whole import logits, parameters

FIXTURES = Path(__file__).parent / "fixtures"
# the most different families come first
_FIRST = ("gemma3", "gpt2", "granite_biased", "qwen3_moe", "smollm3_window")
FOLDERS = sorted(FIXTURES.iterdir(), key=lambda f: (f.name not in _FIRST, f.name))


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda f: f.name)
def test_logits_are_those_of_transformers(folder: Path):
    model, weights = load_named(str(folder)), FolderWeights(folder)
    found_BLV = logits(
        model, parameters(model, weights), np.load(folder / "tokens.npy")
    )
    np.testing.assert_allclose(found_BLV, np.load(folder / "logits.npy"), atol=2e-5)
    file = folder / "model.safetensors"
    assert weights.tensors.num_bytes <= file.stat().st_size
