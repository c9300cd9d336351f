# SPDX-License-Identifier: Apache-2.0
"""Tokens on disk: built once, cached under what they were made of, checked by hash.

Owns the cache directory's layout, its atomic publication and `Dataset`. Does not own
documents (`corpus.py`), ids (`tokenizer.py`) nor batches (`batches.py`).
Shape legend: T tokens of a split.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.data import corpus, tokenizer
from hetjax.errors import BadInput

Progress = Callable[[str], None]  # receives a line for each phase of a build

_FORMAT = 1
_MANIFEST = "manifest.json"
_ARTEFACTS = ("tokenizer.json", "train.npy", "validation.npy")
_TOKENIZER_SAMPLE_CHARS = 4_000_000
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class DamagedDataset(BadInput):
    """A dataset directory whose content is not what its manifest says."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """Immutable tokens of one corpus under one tokenizer.

    `bytes_per_token` is the validation text's UTF-8 bytes over its tokens, ends of
    documents counted as tokens: bits per byte = nats per token / ln 2 /
    bytes_per_token. `hashes` maps each artefact's file name to its SHA-256.
    """

    directory: Path
    train_T: np.ndarray
    validation_T: np.ndarray
    tokenizer: tokenizer.Tokenizer
    bytes_per_token: float
    hashes: Mapping[str, str]


def prepare(
    cache_dir: Path,
    path: Path | None,
    vocab_size: int,
    progress: Progress = lambda line: None,
    doing: Progress = lambda line: None,
) -> Dataset:
    """Open the cached dataset of a user's path (None: offline corpus), or build it.

    `progress` is told what was done, `doing` what begins.
    Processes may call this at once on one cache. Raises BadInput for a path without
    usable text, a vocabulary under 257 and a cache directory that cannot be made.
    """
    tokenizer.check_vocab_size(vocab_size)
    source = corpus.offline() if path is None else corpus.files(path)
    recipe = {"format": _FORMAT, "vocab_size": vocab_size, "source": source.identity}
    directory = cache_dir / f"corpus-{_key(recipe)[:16]}"
    if directory.exists():
        try:
            return load(directory)
        except DamagedDataset as damage:
            warnings.warn(f"{damage.got}; building it again", stacklevel=2)
    with _workspace(cache_dir) as workspace:
        building = Path(workspace) / "dataset"
        building.mkdir()
        _build(building, source, recipe, progress, doing)
        _publish(building, directory)
    return load(directory)


def load(directory: Path) -> Dataset:
    """Open a dataset directory after checking every hash.

    Raises DamagedDataset where a file is missing, changed or of another format.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_bytes())
        hashes = {name: manifest["sha256"][name] for name in _ARTEFACTS}
        sizes, counts = manifest["bytes"], manifest["tokens"]
        bytes_per_token = sizes["validation"] / counts["validation"]
        found_format = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        what = f"{_MANIFEST}: {type(error).__name__}: {error}"
        raise _damaged(directory, what) from error
    if found_format != _FORMAT:
        raise _damaged(directory, f"format {found_format}, not {_FORMAT}")
    for name, expected in hashes.items():
        _check_hash(directory, name, expected)
    return Dataset(
        directory=directory,
        train_T=np.load(directory / "train.npy", mmap_mode="r"),
        validation_T=np.load(directory / "validation.npy", mmap_mode="r"),
        tokenizer=tokenizer.load(directory / "tokenizer.json"),
        bytes_per_token=bytes_per_token,
        hashes=hashes,
    )


def _check_hash(directory: Path, name: str, expected: str) -> None:
    try:
        found = corpus.content_hash(directory / name)
    except OSError as error:
        raise _damaged(directory, f"{name}: {error.strerror}") from error
    if found != expected:
        raise _damaged(
            directory, f"{name} has SHA-256 {found[:12]}, not the manifest's"
        )


def _damaged(directory: Path, what: str) -> DamagedDataset:
    return DamagedDataset(
        got=f"dataset {directory} is damaged ({what})",
        allowed="a directory as hetjax wrote it",
        fix=f"delete it and start again: rm -r {directory}",
    )


def _key(recipe: Mapping[str, Any]) -> str:
    canonical = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _workspace(cache_dir: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=cache_dir, prefix=".building-")
    except OSError as error:
        raise BadInput(
            got=f"cache directory {cache_dir} cannot be used ({error.strerror})",
            allowed="a folder that you may write to, or a path where one can be made",
            fix="choose another cache directory",
        ) from error


def _build(
    directory: Path,
    source: corpus.Source,
    recipe: Mapping[str, Any],
    progress: Progress,
    doing: Progress,
) -> None:
    started_s = time.monotonic()

    def report(line: str) -> None:
        nonlocal started_s
        now_s = time.monotonic()
        progress(f"{line} in {now_s - started_s:.1f} s")
        started_s = now_s

    doing(f"reading {source.name}")
    documents, num_duplicates = corpus.read(source)
    split = corpus.split(documents)
    num_bytes = {"train": _utf8(split.train), "validation": _utf8(split.validation)}
    total_mb = sum(num_bytes.values()) / 1e6
    report(f"data: {len(documents)} documents, {total_mb:.2f} MB of {source.name}")
    doing("training the tokenizer")
    sample = tokenizer.sample(corpus.by_hash(split.train), _TOKENIZER_SAMPLE_CHARS)
    trained = tokenizer.train(sample, recipe["vocab_size"])
    report(f"data: tokenizer with {trained.vocab_size} tokens")
    tokenizer.save(trained, directory / "tokenizer.json")
    doing("turning the text into tokens")
    num_tokens = {}
    for name in ("train", "validation"):
        tokens_T = trained.encode_documents(getattr(split, name))
        _save(directory / f"{name}.npy", tokens_T)
        num_tokens[name] = len(tokens_T)
    report(f"data: {sum(num_tokens.values())} tokens")
    counts = {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "documents": {"train": len(split.train), "validation": len(split.validation)},
        "duplicates": num_duplicates,
    }
    _write_manifest(directory, {**recipe, **counts})


def _save(path: Path, tokens_T: np.ndarray) -> None:
    try:
        np.save(path, tokens_T)
    except OSError as error:
        if error.errno is not None:
            raise
        # NumPy says only that not all of it was written
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def _utf8(documents: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def _write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    hashes = {name: corpus.content_hash(directory / name) for name in _ARTEFACTS}
    built_with = {
        "python": platform.python_version(),
        "tokenizers": importlib.metadata.version("tokenizers"),
    }
    manifest = {**facts, "sha256": hashes, "built_with": built_with}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _publish(building: Path, directory: Path) -> None:
    """Move the finished build into place, unless a sound one got there first."""
    for path in (*building.iterdir(), building):
        _fsync(path)
    for attempt in count():
        try:
            os.replace(building, directory)
            break
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        with suppress(DamagedDataset):
            load(directory)
            break
        with suppress(FileNotFoundError):  # another process moved it away
            os.replace(directory, building.parent / f"damaged-{attempt}")
    _fsync(directory.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
