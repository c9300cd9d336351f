# SPDX-License-Identifier: Apache-2.0
"""Several data sets in one run: their shares, their order, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from hetjax.data.batches import samples, validation_batches
from hetjax.data.dataset import prepare
from hetjax.data.settings import DataConfig, ingredients, shares
from hetjax.data.tokens import Tokens
from hetjax.errors import BadInput

SHARES = 0.5, 0.3, 0.2
SOURCES = [Tokens(np.arange(1000 * n, 1000 * n + 90)) for n in range(3)]


def _drawn(seed: int, steps: range, global_batch: int = 7) -> np.ndarray:
    """Return the first input of every sequence of these steps."""
    made = samples(SOURCES, 8, seed, shares=SHARES)
    batches = [made.batch(step, global_batch)[0][:, 0] for step in steps]
    return np.concatenate(batches)


@pytest.mark.parametrize("num_steps", [1, 10, 143])
def test_after_any_step_each_source_has_had_its_share(num_steps: int):
    found = np.bincount(_drawn(0, range(num_steps)) // 1000, minlength=3)
    assert np.all(np.abs(found - 7 * num_steps * np.array(SHARES)) <= 1)


def test_a_batch_is_that_of_its_step_however_one_came_to_it():
    whole = _drawn(5, range(20))
    np.testing.assert_array_equal(_drawn(5, range(13, 20)), whole[13 * 7 :])
    assert not np.array_equal(_drawn(6, range(20)), whole)


def test_each_source_is_gone_through_once_before_it_comes_again():
    drawn = _drawn(1, range(10))
    first = drawn[drawn < 1000][:11]
    assert sorted(first.tolist()) == [*range(0, 88, 8)]


def test_all_sources_are_validated_with():
    found = validation_batches(SOURCES, 8, 3, 100)
    inputs = np.concatenate([inputs_GL[:, 0] for inputs_GL, _ in found])
    assert np.bincount(inputs // 1000).tolist() == [11, 11, 11]


def _settings(tmp_path: Path, mixture: str) -> DataConfig:
    return DataConfig(mixture=mixture, cache_dir=tmp_path / "cache")


def test_texts_of_several_files_keep_apart_in_one_data_set(tmp_path: Path):
    for name in "ab":
        texts = [json.dumps({"text": f"{name} {n} " + name * 9}) for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    mixture = f"{tmp_path}/a.jsonl=3, {tmp_path}/b.jsonl=1"
    config = _settings(tmp_path, mixture)
    assert shares(config) == (0.75, 0.25)
    made = prepare(config.cache_dir, ingredients(config), 300)
    for number, other in enumerate("ba"):
        for of in made.trains, made.validations:
            text = made.tokenizer.decode(of[number].tokens_T)
            assert len(text) > 50
            assert other not in text.replace("<|endoftext|>", "")
    num_bytes = 2 * sum(len(f"a {n} " + "a" * 9) for n in range(60))
    manifest = json.loads((made.directory / "manifest.json").read_text())
    assert sum(manifest["bytes"].values()) == num_bytes
    validated = sum(len(tokens.tokens_T) for tokens in made.validations)
    held = manifest["bytes"]["validation"] + manifest["bytes"]["validation_1"]
    assert made.bytes_per_token == held / validated


@pytest.mark.parametrize(
    ("mixture", "got"),
    [
        ("a.jsonl=0", "'a.jsonl=0' in --data.mixture"),
        ("a.jsonl=1,b.jsonl=-2", "'b.jsonl=-2' in --data.mixture"),
        ("a.jsonl=nan", "'a.jsonl=nan' in --data.mixture"),
        ("a.jsonl", "'a.jsonl' in --data.mixture"),
        ("a.jsonl=1,a.jsonl=2", "a.jsonl twice in --data.mixture"),
    ],
)
def test_a_mixture_that_cannot_be_is_told_in_three_parts(
    tmp_path: Path, mixture: str, got: str
):
    with pytest.raises(BadInput) as caught:
        ingredients(_settings(tmp_path, mixture))
    assert caught.value.got == got
    assert caught.value.allowed and caught.value.fix


def test_a_path_of_a_mixture_that_is_not_there_is_named(tmp_path: Path):
    config = _settings(tmp_path, f"{tmp_path}/none.jsonl=1")
    with pytest.raises(BadInput, match=f"no file or folder at {tmp_path}/none.jsonl"):
        prepare(config.cache_dir, ingredients(config), 300)


def test_a_path_and_a_mixture_are_refused_together():
    with pytest.raises(BadInput, match=r"--data.path c with --data.mixture a=1"):
        ingredients(DataConfig(path=Path("c"), mixture="a=1"))


def test_prompts_with_completions_need_no_tokenizer_of_a_model(tmp_path: Path):
    rows = [{"prompt": f"what {n}?", "completion": f"it is {n}"} for n in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = prepare(tmp_path / "cache", ingredients(DataConfig(path=path)), 300)
    assert made.has_rows and made.tokenizer.vocab_size > 257  # learnt from the rows
    text = made.tokenizer.decode(made.trains[0].tokens_T)
    assert "what 7?it is 7<|endoftext|>" in text
