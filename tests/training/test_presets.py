# SPDX-License-Identifier: Apache-2.0
"""Presets are complete and valid, and change only on purpose."""

import json
from pathlib import Path

import pytest

from experiments.islands.models import CONFIGS
from hetjax.cluster.cluster_files import load_cluster
from hetjax.models.model import tensor_sizes
from hetjax.models.presets import PUBLISHED, model_preset
from hetjax.plans.plan_files import read_plan
from hetjax.plans.validation import validate_plan
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.presets import PRESETS, preset
from hetjax.training.settings.values import config_values

GOLDEN = Path(__file__).parent / "golden"


# experiments add their own presets when they are imported
OWN = PRESETS.keys() - {*PUBLISHED, *CONFIGS}


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_settings_of_a_preset_are_those_on_record(name: str):
    # A change on purpose? Write the new values into the file, so that the review sees
    # them.
    recorded = json.loads((GOLDEN / f"{name}.json").read_text())
    assert config_values(preset(name).config) == recorded


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_start_from_the_same_settings(name: str):
    recorded = json.loads((GOLDEN / "published.json").read_text())
    values = config_values(preset(name).config)
    own = {"model": name, "run_dir": f"runs/{name}"}
    rate = 1.5e-4 if name in ("llama3.1-70b", "qwen3-32b") else 3e-4
    recorded["optimizer"]["learning_rate"] = rate
    assert values == recorded | own


@pytest.mark.parametrize("name", sorted({*OWN, *PUBLISHED}))
def test_a_preset_is_valid_and_its_model_exists_and_is_long_enough(name: str):
    config = preset(name).config
    check_config(config)
    assert config.seq_len <= model_preset(config.model).max_seq_len


def test_tiny_shows_unlike_replicas_on_all_of_its_cluster():
    tiny = preset("tiny")
    assert tiny.plan is not None and tiny.cluster is not None
    plan, cluster = read_plan(tiny.plan), load_cluster(tiny.cluster)
    model = model_preset(tiny.config.model)
    sizes = tensor_sizes(model)
    validate_plan(plan, cluster, len(model.layers), sizes, model.max_seq_len)
    assert [len(replica.stages) for replica in plan.replicas] == [1, 2, 2]
    assert plan.global_batch == tiny.config.global_batch and tiny.config.simulate
    used = {(stage.node, d) for _, _, stage in plan.stages() for d in stage.devices}
    assert len(used) == cluster.num_devices == 5
