# SPDX-License-Identifier: Apache-2.0
"""All families against transformers itself, in the precisions of checkpoints."""

from pathlib import Path

import numpy as np
import pytest

from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_model,
    random_tokens,
)
from tests.models.hugging_face import whole


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers(family: str, seed: int, tmp_path: Path):
    model, tokens_BL = random_model(family, seed), random_tokens(seed)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    ours = load_named(str(tmp_path))
    params = whole.parameters(ours, FolderWeights(tmp_path))
    found_BLV = whole.logits(ours, params, tokens_BL)
    np.testing.assert_allclose(found_BLV, logits(model, tokens_BL), atol=1e-4)
