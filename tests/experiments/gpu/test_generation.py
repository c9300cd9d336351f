# SPDX-License-Identifier: Apache-2.0
"""Rates and memory of generated text, beside those of a fake transformers."""

from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.gpu.models.random_weights import random_weights
from experiments.gpu.parts import generation
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.models.model import abstract_params
from hetjax.models.presets import model_preset

QUICK = Setting(platform="cpu", quick=True)


def stub(path: Path, code: str) -> str:
    """Return a fake Python that runs this code whatever its arguments."""
    path.write_text(f"#!/usr/bin/env bash\n{code}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def measured(patch: pytest.MonkeyPatch, python: str) -> dict[str, Row]:
    patch.setattr(generation, "has_torch", lambda: True)
    patch.setattr("experiments.gpu.parts.generation.sys.executable", python)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        return {row.what: row for row in generation.measure(QUICK)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The fake transformers take half a second for the prompt and 1.5 for all."""
    folder = tmp_path_factory.mktemp("stub")
    figures = '{"prompt_s": 0.5, "whole_s": 1.5, "peak_bytes": 7}'
    code = f"echo \"$@\" > '{folder}/asked'; echo loading; echo '{figures}'"
    with pytest.MonkeyPatch.context() as patch:
        found = measured(patch, stub(folder / "python", code))
    asked = (folder / "asked").read_text(encoding="utf-8")
    assert asked == "-m experiments.gpu.models.torch_text tiny float32 cpu 16 8\n"
    return found


def test_rates_are_of_the_prompt_and_of_what_follows_the_first_token(
    rows: dict[str, Row],
):
    assert rows["prompt, transformers"].measured == 16 / 0.5
    assert rows["following tokens, transformers"].measured == 7 / 1.0
    assert rows["peak memory, transformers"].measured == 7
    for which in ("prompt", "following tokens"):
        ours = rows[f"{which}, hetjax"].measured
        assert isinstance(ours, float) and ours > 0
        theirs = rows[f"{which}, transformers"].measured
        ratio = rows[f"rate of hetjax over transformers, {which}"].measured
        assert ratio == pytest.approx(ours / theirs)  # pyright: ignore


def test_the_memory_of_weights_is_predicted(rows: dict[str, Row]):
    shapes = [
        parameter.shape
        for module in model_preset("tiny").modules
        for parameter in abstract_params(module).values()
    ]
    expected = 4 * sum(int(np.prod(shape)) for shape in shapes)
    assert rows["memory of the weights"].predicted == expected


def test_the_product_is_measured_where_transformers_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    python = stub(tmp_path / "python", "echo 'no such card' >&2; exit 1")
    rows = measured(monkeypatch, python)
    assert rows["runs, transformers"].measured is False
    assert "no such card" in rows["runs, transformers"].note
    assert "following tokens, hetjax" in rows
    assert "following tokens, transformers" not in rows


def test_it_is_said_that_there_is_no_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "has_torch", lambda: False)
    row = [*generation.measure(QUICK)][-1]
    assert (row.what, row.measured) == ("runs, transformers", None)
    assert "missing" in row.note


def test_weights_without_meaning_are_spread_as_first_ones_are():
    read = random_weights()
    assert np.all(read("norm.scale", (7,)) == 1)
    weight = read("mlp.up", (1100, 1000))
    assert weight.dtype == np.float32
    assert np.std(weight) == pytest.approx(0.02, rel=0.01)
    assert len(np.unique(weight, axis=0)) == 1100
