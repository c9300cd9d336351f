# SPDX-License-Identifier: Apache-2.0
"""Models, tokenizers and rows that do not match: each command refuses them."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hetjax.errors import BadInput
from hetjax.eval import main as evaluate
from hetjax.export import main as export
from hetjax.models.hugging_face import written
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.stored_tensors import INDEX
from hetjax.sample import main as sample
from hetjax.train import main as train
from tests.serving.model_folder import CONFIG, drawn, write_folder
from tests.training.small import SIX

ONE, *_ = CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Hi {number}"},
            {"role": "assistant", "content": "A cat."},
        ]
    }
    for number in range(40)
]
pytestmark = pytest.mark.usefixtures("quick_compiling")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def rows(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def training(folder: Path, data: Path | None = None, *more: str) -> list[str]:
    """Return the words to train from the folder's weights, on chats or these data."""
    beside = folder.parent
    data = data or rows(beside / "rows.jsonl", *CHATS)
    words = [str(folder), "--init", str(folder), "--data.path", str(data)]
    words += ["--run-dir", str(beside / "run"), "--data.cache-dir", str(beside / "c")]
    words += ["--steps", "1", "--seq-len", "32", "--global-batch", "6"]
    words += ["--cluster", str(SIX), "--planner", "even", "--simulate"]
    words += ["--evaluation.sample-tokens", "0", "--checkpoint.every", "0"]
    return [*words, *more]


def check_refused(
    command: Callable[[list[str]], int],
    words: Sequence[str],
    told: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert command(list(words)) == BadInput.exit_code == 2
    heard = capsys.readouterr().err
    starts = [line.partition(":")[0] for line in heard.splitlines()]
    # a slow machine first says that it starts
    assert starts[-4:] == ["hetjax", "got", "allowed", "fix"], heard
    assert all(word in heard for word in told), heard


def with_fields(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def larger_tokenizer(folder: Path) -> None:
    """Give the tokenizer one more token than the model has rows for."""
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    more = {"id": CONFIG.vocab_size, "content": "<|more|>", "special": True}
    same = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    told["added_tokens"].append(more | same)
    ids = told["model"]["vocab"]
    first = max([*ids.values(), *(t["id"] for t in told["added_tokens"][:-1])]) + 1
    ids |= {f"<filler {at}>": at for at in range(first, CONFIG.vocab_size)}
    file.write_text(json.dumps(told))


OTHER_VOCABULARY = [f"ids up to {CONFIG.vocab_size}", "vocabulary of 300", "ids below"]


def test_a_tokenizer_that_does_not_match_the_vocabulary_is_refused_by_train(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    larger_tokenizer(folder)
    check_refused(train, training(folder), OTHER_VOCABULARY, capsys)
    good = write_folder(folder.with_name("good"))
    own = training(good, None, "--data.tokenizer", str(folder))
    check_refused(train, own, OTHER_VOCABULARY, capsys)


@pytest.mark.parametrize("command", [sample, evaluate])
def test_a_tokenizer_that_does_not_match_the_vocabulary_is_refused_in_use(
    folder: Path, capsys: pytest.CaptureFixture[str], command
):
    larger_tokenizer(folder)
    text = folder.with_name("text.txt")
    text.write_text("A cat sat.")
    own = ["--data", str(text)] if command is evaluate else ["--prompt", "A"]
    check_refused(command, [str(folder), *own], OTHER_VOCABULARY, capsys)


def test_a_run_whose_tokenizer_was_exchanged_is_neither_exported_nor_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(training(folder)) == 0
    run_dir, to = folder.with_name("run"), folder.with_name("exported")
    assert export([str(run_dir), "--to", str(folder.with_name("before"))]) == 0
    larger_tokenizer(run_dir)
    words = [str(run_dir), "--to", str(to)]
    check_refused(export, words, OTHER_VOCABULARY, capsys)
    assert not to.exists()
    check_refused(sample, [str(run_dir), "--prompt", "A"], OTHER_VOCABULARY, capsys)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    before, written.FILE_BYTES = written.FILE_BYTES, 4_000
    try:
        fields = fields_of(CONFIG)
        written.write_model(folder, CONFIG, fields, drawn, "float32")
    finally:
        written.FILE_BYTES = before
    assert (folder / INDEX).exists()
    (folder / "model-00002-of-00004.safetensors").unlink()


def of_another_architecture(folder: Path) -> None:
    with_fields(folder, model_type="mamba", architectures=["MambaForCausalLM"])


BAD_FOLDERS: list[tuple[Callable[[Path], None], list[str]]] = [
    (empty, ["config.json"]),
    (without_a_shard, ["model-00002-of-00004.safetensors, which its index names"]),
    (of_another_architecture, ["mamba", "llama", "qwen3_moe", "gpt2", "gemma3_text"]),
]


@pytest.mark.parametrize(("spoil", "told"), BAD_FOLDERS)
@pytest.mark.parametrize("command", [train, sample, evaluate])
def test_a_folder_that_is_not_a_whole_model_is_refused_by_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], command, spoil, told: list[str]
):
    words = training(folder)
    spoil(folder)
    if command is not train:
        text = folder.with_name("text.txt")
        text.write_text("A cat sat.")
        own = ["--data", str(text)] if command is evaluate else ["--prompt", "A"]
        words = [str(folder), *own]
    check_refused(command, words, told, capsys)


@pytest.mark.parametrize(
    "told", ["{", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}']
)
def test_settings_of_generation_that_cannot_be_are_refused_in_use(
    folder: Path, capsys: pytest.CaptureFixture[str], told: str
):
    (folder / "generation_config.json").write_text(told)
    words = [str(folder), "--prompt", "A"]
    check_refused(sample, words, ["generation_config.json"], capsys)


BAD_ROWS: list[tuple[dict, Sequence[str], list[str]]] = [
    (
        {"messages": [{"by": "user", "value": "Hi"}]},
        (),
        ["line 41, message 1 has no role (its fields: 'by', 'value')"],
    ),
    ({"messages": [{"role": "", "content": "Hi"}]}, (), ["has an empty role"]),
    ({"messages": []}, (), ["has no message in 'messages'"]),
    (ONE, ("--data.column", "body"), ["has no field 'body' (its fields: 'messages')"]),
]


@pytest.mark.parametrize(("record", "more", "told"), BAD_ROWS)
def test_a_row_that_says_too_little_is_named_by_train(
    folder: Path, capsys: pytest.CaptureFixture[str], record, more, told: list[str]
):
    data = rows(folder.with_name("rows.jsonl"), *CHATS, record)
    check_refused(train, training(folder, data, *more), told, capsys)


def test_a_column_in_which_there_is_nothing_is_refused_by_train(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    data = rows(folder.with_name("rows.jsonl"), *[{"body": " " * n} for n in range(40)])
    words = training(folder, data, "--data.column", "body")
    check_refused(train, words, ["holds no text (0 documents)"], capsys)
