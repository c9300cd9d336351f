# SPDX-License-Identifier: Apache-2.0
"""A run on packed rows: over processes, on other plans, stopped and resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.cluster.cluster_files import load_cluster
from hetjax.data.dataset import prepare
from hetjax.data.settings import ingredients
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.training.directory.rundir import Previous, check_same_data
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset
from tests.training.small import (
    MODEL,
    ONE_REPLICA,
    SIX,
    TWO_REPLICAS,
    but,
    losses,
    small_preset,
)


def _of_rows(tmp_path: Path, of: Plan = TWO_REPLICAS, **changes: object) -> Preset:
    """Return the small run on two files of short prompts with unlike lengths."""
    tmp_path.mkdir(exist_ok=True)
    for name, times in ("a", 1), ("b", 3):
        rows = [
            {"prompt": f"{name} {n}: ", "completion": f"{n * n} " * times}
            for n in range(60)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    preset = small_preset(tmp_path, of)
    mixture = f"{tmp_path}/a.jsonl=2,{tmp_path}/b.jsonl=1"
    data = replace(preset.config.data, path=None, mixture=mixture)
    return but(preset, data=data, **changes)


def _assert_alike(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-5), step


def test_packed_rows_of_several_files_give_one_curve_on_any_plan_and_after_a_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    whole = _of_rows(tmp_path / "whole")
    assert run(whole.config, whole, MODEL) == 0
    assert "% padding" in capfd.readouterr().out
    expected = losses(whole.config.run_dir)
    assert json.loads((whole.config.run_dir / "plan.json").read_text())["packed"]
    other = _of_rows(tmp_path / "other", ONE_REPLICA, stop_after=4)
    assert run(other.config, other, MODEL) == 4
    again = but(other, stop_after=None)
    assert run(again.config, again, MODEL) == 0
    _assert_alike(losses(other.config.run_dir), expected)


def test_where_rows_have_changed_the_files_of_the_mixture_are_named(tmp_path: Path):
    config = _of_rows(tmp_path).config
    dataset = prepare(tmp_path / "cache", ingredients(config.data), MODEL.vocab_size)
    previous = Previous(
        config=config,
        dataset=dataset.directory,
        hashes={**dataset.hashes, "train.npy": "another"},
        cluster=load_cluster(SIX),
        plan=TWO_REPLICAS,
    )
    files = f"--data.mixture {tmp_path}/a.jsonl, {tmp_path}/b.jsonl"
    with pytest.raises(BadInput, match=rf"\({files}\)"):
        check_same_data(previous, dataset, config.run_dir)
