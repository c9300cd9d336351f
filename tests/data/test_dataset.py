# SPDX-License-Identifier: Apache-2.0
"""The cache of datasets: built once, verified by hash, safe under concurrent builds."""

import hashlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.data import dataset
from hetjax.data.settings import Ingredients
from hetjax.errors import BadInput

_ROOT = Path(dataset.__file__).parents[2]
_FILES = {"tokenizer.json", "train.npy", "validation.npy", "manifest.json"}


def _text_file(folder: Path, copies: int = 1) -> Path:
    path = folder / "text.txt"
    own = "\n".join(p.read_text() for p in sorted(Path(__file__).parent.glob("*.py")))
    path.write_text("\n".join(f"{own}# copy {i}" for i in range(copies)))
    return path


def _prepare(cache_dir: Path, path: Path, vocab_size: int) -> dataset.Dataset:
    return dataset.prepare(cache_dir, Ingredients(path=path), vocab_size)


def _entries(cache_dir: Path) -> list[str]:
    return sorted(p.name for p in cache_dir.iterdir())


def test_a_prepared_dataset_decodes_to_the_text_it_was_made_of(tmp_path):
    path = tmp_path / "text.jsonl"
    texts = [f"document {i} " * 30 for i in range(100)]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    made = _prepare(tmp_path / "cache", path, 300)
    documents = [
        text
        for tokens_T in (made.trains[0].tokens_T, made.validations[0].tokens_T)
        for text in made.tokenizer.decode(tokens_T).split("<|endoftext|>")[:-1]
    ]
    whole = [text for text in documents if text in texts]
    assert len(set(whole)) >= 99
    assert len("".join(documents)) == len("".join(texts))


def test_bytes_per_token_counts_the_validation_texts_utf8_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("h\u00e9llo w\u00f6rld \u4e16\u754c\n" * 500, encoding="utf-8")
    made = _prepare(tmp_path / "cache", path, 300)
    text = made.tokenizer.decode(made.validations[0].tokens_T).replace(
        "<|endoftext|>", ""
    )
    assert made.bytes_per_token == len(text.encode()) / len(
        made.validations[0].tokens_T
    )


def test_the_manifest_states_counts_source_and_hashes(tmp_path):
    path = _text_file(tmp_path)
    made = _prepare(tmp_path / "cache", path, 300)
    manifest = json.loads((made.directory / "manifest.json").read_text())
    sha256 = {
        name: hashlib.sha256((made.directory / name).read_bytes()).hexdigest()
        for name in _FILES - {"manifest.json"}
    }
    assert manifest["sha256"] == made.hashes == sha256
    assert manifest["tokens"] == {
        "train": len(made.trains[0].tokens_T),
        "validation": len(made.validations[0].tokens_T),
    }
    listed = {
        "name": "text.txt",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert manifest["source"] == {"kind": "files", "files": [listed]}
    assert manifest["vocab_size"] == 300
    assert set(manifest["built_with"]) == {"python", "tokenizers"}


def test_a_second_call_builds_nothing_and_maps_the_files(tmp_path):
    path, lines = _text_file(tmp_path), []
    first = dataset.prepare(
        tmp_path / "cache", Ingredients(path=path), 300, progress=lines.append
    )
    assert len(lines) == 4 and all(line.startswith("data: ") for line in lines)
    second = dataset.prepare(
        tmp_path / "cache", Ingredients(path=path), 300, progress=lines.append
    )
    assert len(lines) == 4
    assert second.directory == first.directory and second.hashes == first.hashes
    assert (
        isinstance(second.trains[0].tokens_T, np.memmap)
        and not second.trains[0].tokens_T.flags.writeable
    )


def test_text_and_vocabulary_have_directories_of_their_own(tmp_path):
    cache_dir, path = tmp_path / "cache", _text_file(tmp_path)
    made = [_prepare(cache_dir, path, size).directory for size in (300, 301)]
    path.write_text(path.read_text() + "more")
    made.append(_prepare(cache_dir, path, 300).directory)
    assert len(set(made)) == 3
    assert _entries(cache_dir) == sorted(d.name for d in made)


def _flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("name", sorted(_FILES))
@pytest.mark.parametrize("damage", [_truncate, Path.unlink])
def test_a_damaged_cache_is_built_again_with_one_warning(tmp_path, name, damage):
    cache_dir, path = tmp_path / "cache", _text_file(tmp_path)
    good = _prepare(cache_dir, path, 300)
    damage(good.directory / name)
    with pytest.warns(UserWarning) as caught:
        again = _prepare(cache_dir, path, 300)
    (message,) = [str(w.message) for w in caught]
    assert message.startswith(f"dataset {good.directory} is damaged ({name}")
    assert message.endswith("; building it again")
    assert again.hashes == good.hashes
    assert _entries(cache_dir) == [good.directory.name]
    assert {p.name for p in again.directory.iterdir()} == _FILES


@pytest.mark.parametrize("name", sorted(_FILES - {"manifest.json"}))
def test_one_wrong_bit_in_an_artefact_is_found(tmp_path, name):
    made = _prepare(tmp_path / "cache", _text_file(tmp_path), 300)
    _flip_a_byte(made.directory / name)
    with pytest.raises(dataset.DamagedDataset) as caught:
        dataset.load(made.directory)
    message = str(caught.value)
    assert message.startswith(f"got: dataset {made.directory} is damaged ({name} has")
    assert message.endswith(
        "\nallowed: a directory as hetjax wrote it\n"
        f"fix: delete it and start again: rm -r {made.directory}"
    )


def test_another_format_is_refused(tmp_path):
    made = _prepare(tmp_path / "cache", _text_file(tmp_path), 300)
    path = made.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(dataset.DamagedDataset, match=r"\(format 99, not 1\)"):
        dataset.load(made.directory)


def test_a_moved_copy_of_a_dataset_loads_as_the_same_dataset(tmp_path):
    made = _prepare(tmp_path / "cache", _text_file(tmp_path), 300)
    made.directory.rename(tmp_path / "copy")
    copy = dataset.load(tmp_path / "copy")
    assert copy.hashes == made.hashes
    np.testing.assert_array_equal(copy.trains[0].tokens_T, made.trains[0].tokens_T)


_PREPARE = """
import sys, time
from pathlib import Path
from hetjax.data import dataset
from hetjax.data.settings import Ingredients
cache_dir, path, start = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
Path(sys.argv[4]).touch()
while not start.exists():
    time.sleep(0.001)
made = dataset.prepare(cache_dir, Ingredients(path=path), 300)
print(made.directory.name, sorted(made.hashes.items()))
"""


@pytest.mark.parametrize("damaged_before", [False, True])
def test_two_processes_at_once_leave_one_sound_directory(tmp_path, damaged_before):
    cache_dir, path = tmp_path / "cache", _text_file(tmp_path, copies=10)
    if damaged_before:
        _truncate(_prepare(cache_dir, path, 300).directory / "train.npy")
    start, ready = tmp_path / "start", [tmp_path / "ready0", tmp_path / "ready1"]
    command = [sys.executable, "-c", _PREPARE, str(cache_dir), str(path), str(start)]
    processes = [
        subprocess.Popen(
            [*command, str(r)], cwd=_ROOT, stdout=subprocess.PIPE, text=True
        )
        for r in ready
    ]
    while not all(r.exists() for r in ready):
        assert all(p.poll() is None for p in processes)
    start.touch()
    outputs = {p.communicate(timeout=60)[0] for p in processes}
    assert [p.returncode for p in processes] == [0, 0]
    assert len(outputs) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = _prepare(cache_dir, path, 300)
    assert _entries(cache_dir) == [made.directory.name]


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"body": "bad"}\n')
    with pytest.raises(BadInput, match="line 2 has no field 'text'"):
        _prepare(tmp_path / "cache", path, 300)
    assert _entries(tmp_path / "cache") == []


def test_a_small_vocabulary_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(BadInput, match="got: vocabulary of 256 tokens"):
        _prepare(tmp_path / "cache", _text_file(tmp_path), 256)
    assert not (tmp_path / "cache").exists()


def test_a_cache_path_that_is_a_file_is_refused(tmp_path):
    path = _text_file(tmp_path)
    with pytest.raises(BadInput) as caught:
        _prepare(path, path, 300)
    assert str(caught.value) == (
        f"got: cache directory {path} cannot be used (File exists)\n"
        "allowed: a folder that you may write to, or a path where one can be made\n"
        "fix: choose another cache directory"
    )


def _notes(tmp_path: Path, texts: list[str], **others: Any) -> tuple[list[str], int]:
    """Return a build's messages, and how many bytes it holds out."""
    path, lines = tmp_path / "text.jsonl", list[str]()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    wanted = Ingredients(path=path, **others)
    made = dataset.prepare(tmp_path / "cache", wanted, 300, progress=lines.append)
    text = made.tokenizer.decode(made.validations[0].tokens_T)
    return lines, len(text.replace("<|endoftext|>", "").encode())


def test_duplicates_and_what_is_held_out_are_told(tmp_path):
    texts = [f"{number % 252:04} and so on" for number in range(400)]
    lines, num_bytes = _notes(tmp_path, texts)
    path = tmp_path / "text.jsonl"
    told = f"data: {path}: 148 of 400 texts are duplicates and are left out"
    assert told in lines
    share = num_bytes / sum(len(text) for text in texts[:252])
    assert 0.09 < share < 0.11  # as docs/train.md states for less than 1 MB
    (held,) = [line for line in lines if "held out" in line]
    assert abs(float(held.split("%")[0].removeprefix("data: ")) - 100 * share) < 0.5
    assert "--data.validation" in held


def test_without_duplicates_and_with_validation_text_nothing_is_told(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("something else")
    lines, _ = _notes(tmp_path, ["one", "two"], validation=other)
    assert not [line for line in lines if "held out" in line or "left out" in line]
