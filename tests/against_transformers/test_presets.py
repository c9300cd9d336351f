# SPDX-License-Identifier: Apache-2.0
"""Presets of published models have the parameters that transformers makes of them."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetjax.models import presets
from hetjax.models.decoders import model_of
from hetjax.models.model import parameter_count

FIELDS = tomllib.loads((Path(presets.__file__).parent / "published.toml").read_text())


@pytest.mark.parametrize("name", presets.PUBLISHED)
def test_a_preset_has_the_parameters_of_transformers(name: str):
    config = AutoConfig.for_model(**FIELDS[name])
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    ours = model_of(replace(presets.model_config(name), vocab_multiple=1))
    found = sum(map(parameter_count, ours.layers))
    assert found == sum(weight.numel() for weight in theirs.parameters())
