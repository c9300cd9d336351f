# SPDX-License-Identifier: Apache-2.0
"""`hetjax sample` and `hetjax eval` on a folder, and what they refuse."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.api.trained_model import TrainedModel
from hetjax.data.hugging_face import read_tokenizer
from hetjax.errors import BadInput
from hetjax.eval import main as evaluate
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from hetjax.sample import main as sample
from tests.models.hugging_face import whole
from tests.serving.model_folder import CONFIG, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "small")


def greedy(folder: Path, tokens: list[int], number: int) -> list[int]:
    """Return the likeliest tokens, each from the whole text before it, in one jit."""
    model, weights = load_named(str(folder)), FolderWeights(folder)
    params, tokens = whole.parameters(model, weights), list(tokens)
    for _ in range(number):
        tokens_BL = np.zeros((1, model.max_seq_len), np.int32)
        tokens_BL[0, : len(tokens)] = tokens
        logits_LV = whole.logits(model, params, tokens_BL)[0]
        tokens.append(int(np.argmax(logits_LV[len(tokens) - 1, :290])))
    return tokens[-number:]


def json_of(capsys: pytest.CaptureFixture[str], command, arguments: list[str]) -> dict:
    assert command([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_likeliest_text_is_that_of_whole_texts(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    command = [str(folder), "--prompt", "A cat", "--temperature", "0", "--tokens", "6"]
    found = json_of(capsys, sample, command)
    tokenizer = read_tokenizer(folder)
    given = tokenizer.ids.encode("A cat")
    expected = greedy(folder, given, len(found["tokens"]))
    assert found["tokens"] == expected and found["prompt_tokens"] == len(given)
    ended = found["tokens"][-1] in (1, 3)
    assert found["reason"] == ("end" if ended else "tokens")
    assert found["text"] == tokenizer.ids.decode(expected[: -1 if ended else None])
    assert found["first_s"] > 0 and found["tokens_per_s"] > 0
    assert sample(command) == 0
    assert capsys.readouterr().out == found["text"] + "\n"


def test_a_turn_is_written_in_the_chat_template(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    command = [str(folder), "--prompt", "Hi", "--chat", "--temperature", "0"]
    found = json_of(capsys, sample, [*command, "--tokens", "3"])
    tokenizer = read_tokenizer(folder)
    assert tokenizer.template is not None
    text = tokenizer.template.render(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    given = tokenizer.ids.encode(text)
    assert found["prompt_tokens"] == len(given)
    assert found["tokens"] == greedy(folder, given, len(found["tokens"]))


def test_a_turn_ends_with_the_token_that_the_template_puts_after_it(tmp_path: Path):
    path = write_folder(tmp_path / "chats")
    (path / "generation_config.json").unlink()
    model = TrainedModel(path)
    assert model._source.ends == {1} and model._turn_ends() == {3}


def test_the_same_seed_gives_the_same_text(folder: Path):
    model = TrainedModel(folder)
    texts = [model.sample("A", num_tokens=12, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_text_is_no_longer_than_the_model_takes(folder: Path, tmp_path: Path):
    path = write_folder(tmp_path / "short", replace(CONFIG, max_seq_len=8))
    (path / "generation_config.json").unlink()
    model, reasons = TrainedModel(path), []
    for seed in range(3):
        found = model.sample("A cat", num_tokens=50, seed=seed)
        reasons.append(found.reason)
        if found.reason == "max_seq_len":  # the last token is found, but never read
            assert found.prompt_tokens + len(found.tokens) == 9
    assert "max_seq_len" in reasons


def test_texts_and_questions_are_scored_in_one_go(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, questions = tmp_path / "text.txt", tmp_path / "questions.jsonl"
    text.write_text("A cat sat.\n\n\nA dog sat.\n")
    questions.write_text('{"query": "A", "choices": ["cat", "dog"], "answer": 0}\n')
    command = [str(folder), "--data", str(text), "--choices", str(questions)]
    found = json_of(capsys, evaluate, command)
    assert {"loss", "perplexity", "bits_per_byte", "accuracy"} <= found.keys()
    assert (found["num_rows"], found["num_questions"]) == (2, 1)
    assert evaluate(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"bits per byte {found['bits_per_byte']:.4f}" in lines[0]
    assert f"accuracy {found['accuracy']:.2%}" in lines[1]


def no_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").unlink()
    return [str(folder)]


def without_model(folder: Path) -> list[str]:
    (folder / "config.json").unlink()
    return [str(folder)]


def other_vocabulary(folder: Path) -> list[str]:
    fields = json.loads((folder / "config.json").read_text()) | {"vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(fields))
    return [str(folder)]


def without_template(folder: Path) -> list[str]:
    (folder / "chat_template.jinja").unlink()
    return [str(folder), "--prompt", "Hi", "--chat"]


BAD_SAMPLES: list[tuple[Callable[[Path], list[str]], str]] = [
    (lambda folder: [], "no RUN_OR_FOLDER"),
    (lambda folder: [str(folder / "nowhere")], "not a folder"),
    (without_model, "no run and no model"),
    (no_tokenizer, "without tokenizer.json"),
    (other_vocabulary, "a vocabulary of 100"),
    (without_template, "no chat template"),
    (lambda folder: [str(folder), "--prompt", "word " * 70], "a prompt of"),
    (lambda folder: [str(folder), "--step", "3"], "which is not a run"),
    (lambda folder: [str(folder), "--on", "plan"], "a model that is not from a run"),
    (lambda folder: [str(folder), "--top-p", "0"], "--top-p 0"),
    (lambda folder: [str(folder), "--tokens", "0"], "--tokens 0"),
    (lambda folder: [str(folder), "--tokns", "3"], "unknown option"),
]
BAD_SCORES: list[tuple[Callable[[Path], list[str]], str]] = [
    (lambda folder: [], "no RUN_OR_FOLDER"),
    (lambda folder: [str(folder)], "neither --data nor --choices"),
    (lambda folder: [str(folder), "--data", str(folder / "no.txt")], "no file"),
    (lambda folder: [str(folder), "--choices", str(folder / "no")], "cannot be read"),
    *(
        (lambda folder, o=option: [str(folder), "--data", str(folder), *o], option[0])
        for option in (["--window", "65"], ["--stride", "65"], ["--batch-size", "0"])
    ),
]


@pytest.mark.parametrize(("arguments", "told"), BAD_SAMPLES)
def test_what_cannot_be_sampled_is_refused_in_three_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments, told: str
):
    check_refused(sample, arguments(write_folder(tmp_path / "m")), told, capsys)


@pytest.mark.parametrize(("arguments", "told"), BAD_SCORES)
def test_what_cannot_be_scored_is_refused_in_three_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments, told: str
):
    check_refused(evaluate, arguments(write_folder(tmp_path / "m")), told, capsys)


def test_a_bad_question_is_refused_before_a_text_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def score(*given: Any, **more: Any) -> None:
        raise AssertionError("the text is scored first")

    monkeypatch.setattr(TrainedModel, "evaluate", score)
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "q.jsonl").write_text('{"context": "a", "choices": ["b"], "gold": 1}')
    folder = str(write_folder(tmp_path / "m"))
    asked = [
        "--data",
        str(tmp_path / "text.txt"),
        "--choices",
        str(tmp_path / "q.jsonl"),
    ]
    check_refused(evaluate, [folder, *asked], "line 1", capsys)


def check_refused(command, arguments: list[str], told: str, capsys) -> None:
    assert command(arguments) == BadInput.exit_code == 2
    heard = capsys.readouterr()
    assert told in heard.err and heard.out == ""
    assert all(part in heard.err for part in ("got:", "allowed:", "fix:"))
