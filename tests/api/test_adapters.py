# SPDX-License-Identifier: Apache-2.0
"""A PEFT folder in use: the same as its base with the adapters added by numpy."""

import json
import shutil
from pathlib import Path

import pytest

from hetjax.api.trained_model import TrainedModel
from hetjax.eval import main as evaluate
from hetjax.models.hugging_face.adapter_config import ADAPTER_CONFIG
from hetjax.sample import main as sample
from hetjax.train import main as train
from tests.models.hugging_face.test_adapters_read import (
    ALPHA,
    RANK,
    Q,
    adapters,
    merged,
)
from tests.serving.model_folder import write_folder

MODULES = {Q: RANK, "model.layers.1.mlp.down_proj": RANK}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "base")


def test_adapters_are_used_as_their_base_with_them_added(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    alone = adapters(tmp_path / "adapters", MODULES, str(base))
    scales = dict.fromkeys(MODULES, ALPHA / RANK)
    one = merged(alone, tmp_path / "merged", scales, str(base))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(base / file, one / file)
    text = tmp_path / "text.txt"
    text.write_text("A cat sat on a mat, and another cat sat on that cat.")
    ours, theirs, plain = (TrainedModel(each) for each in (alone, one, base))
    expected = theirs.evaluate(text)
    found = ours.evaluate(text)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert abs(plain.evaluate(text).loss - expected.loss) > 0.01
    tokens = [m.sample("A cat", num_tokens=9, temperature=0) for m in (ours, theirs)]
    assert tokens[0].tokens == tokens[1].tokens
    capsys.readouterr()
    assert sample([str(alone), "--prompt", "A", "--tokens", "2"]) == 0
    assert evaluate([str(alone), "--data", str(text)]) == 0


@pytest.mark.parametrize("command", ["sample", "eval", "train", "init"])
def test_adapters_that_cannot_be_used_are_refused_by_every_command(
    base: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    alone = adapters(tmp_path / "adapters", MODULES, str(base), use_dora=True)
    text = tmp_path / "text.txt"
    text.write_text("A cat sat.")
    data = ["--data.path", str(text), "--run-dir", str(tmp_path / "run")]
    words = {
        "sample": lambda: sample([str(alone), "--prompt", "A"]),
        "eval": lambda: evaluate([str(alone), "--data", str(text)]),
        "train": lambda: train([str(alone), *data]),
        "init": lambda: train([str(base), "--init", str(alone), *data]),
    }
    assert words[command]() == 2
    heard = capsys.readouterr().err
    assert "use_dora = True" in heard and "fix: " in heard
    assert not (tmp_path / "run").exists()


def test_adapters_as_a_model_are_weights_to_begin_with(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    alone = adapters(tmp_path / "adapters", MODULES, str(base))
    assert train([str(alone), "--run-dir", str(tmp_path / "run")]) == 2
    heard = capsys.readouterr().err
    assert f"fix: hetjax train {base} --init {alone}" in heard
    told = json.loads((alone / ADAPTER_CONFIG).read_text())
    told["base_model_name_or_path"] = str(tmp_path / "gone")
    (alone / ADAPTER_CONFIG).write_text(json.dumps(told))
    assert sample([str(alone), "--prompt", "A"]) == 2
    heard = capsys.readouterr().err
    assert "the base of the adapters" in heard and "gone" in heard
