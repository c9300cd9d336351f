# SPDX-License-Identifier: Apache-2.0
"""Keeps tokens on disk: built once, cached by what they were made of, checked by hash.

Owns the cache directory's layout, its atomic publication and `Dataset`. Does not own
rows (`corpus.py`), the building of token files (`building.py`), ids (`tokenizer.py`)
nor batches (`batches.py`).
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.data.building import Progress, Sources, build, file_name
from hetjax.data.hugging_face import (
    CONFIG,
    FILES,
    TOKENIZER,
    ModelTokenizer,
    check_fits,
    read_tokenizer,
)
from hetjax.data.settings import VALIDATION, Ingredients
from hetjax.data.sources import corpus
from hetjax.data.tokenizer import Tokenizer, check_vocab_size
from hetjax.data.tokenizer import load as load_tokenizer
from hetjax.data.tokens import Rows, Tokens
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.reading import Unreadable, read_bytes
from hetjax.names import check_relative

_FORMAT = 1
_MANIFEST = "manifest.json"
_ARTEFACTS = ("tokenizer.json", "train.npy", "validation.npy")
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class DamagedDataset(BadInput):
    """A dataset directory whose content does not match its manifest."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """Immutable tokens of one corpus under one tokenizer.

    `bytes_per_token` is the number of UTF-8 bytes of the learnt validation text over
    the number of its tokens, ends of documents included: bits per byte = nats per token
    / ln 2 / bytes_per_token. `hashes` maps each artefact's file name to its SHA-256.
    """

    directory: Path
    trains: tuple[Tokens, ...]  # of each source
    validations: tuple[Tokens, ...]
    tokenizer: Tokenizer
    bytes_per_token: float
    hashes: Mapping[str, str]

    @property
    def tokenizer_files(self) -> list[str]:
        return [name for name in FILES if name in self.hashes]

    @property
    def num_tokens(self) -> int:
        """The number of training tokens."""
        return sum(len(tokens.tokens_T) for tokens in self.trains)

    @property
    def has_rows(self) -> bool:
        """Whether some source has rows with a prompt or messages."""
        return any(tokens.rows is not None for tokens in self.trains)


def prepare(
    cache_dir: Path,
    wanted: Ingredients,
    vocab_size: int,
    progress: Progress = lambda line: None,
    doing: Progress = lambda line: None,
) -> Dataset:
    """Open the cached dataset of these ingredients, or build it.

    `progress` receives what was done, `doing` what begins.
    Several processes may call this at once on one cache. Raises BadInput for a path
    without usable rows, a vocabulary that is too small for the tokenizer (for our own:
    under 257) and a cache directory that cannot be made.
    """
    theirs = checked_tokenizer(wanted, vocab_size)
    sources = _sources(wanted)
    recipe = _recipe(sources, wanted.tokenizer, vocab_size)
    directory = cache_dir / f"corpus-{_key(recipe)[:16]}"
    if directory.exists():
        try:
            return load(directory)
        except DamagedDataset as damage:
            warnings.warn(f"{damage.got}; building it again", stacklevel=2)
    with _workspace(cache_dir) as workspace:
        building = Path(workspace) / "dataset"
        building.mkdir()
        if wanted.tokenizer is not None:
            _copy_tokenizer(wanted.tokenizer, building)
        counts = build(building, sources, theirs, vocab_size, progress, doing)
        _write_manifest(building, {**recipe, **counts})
        _publish(building, directory)
    return load(directory)


def checked_tokenizer(wanted: Ingredients, vocab_size: int) -> ModelTokenizer | None:
    """Return the tokenizer that is given, if one is; raise BadInput if the vocabulary
    is too small for it, or for our own."""
    if wanted.tokenizer is None:
        check_vocab_size(vocab_size)
        return None
    found = read_tokenizer(wanted.tokenizer)
    check_fits(found.ids, vocab_size, wanted.tokenizer)
    return found


def kept(
    cache_dir: Path, hashes: Mapping[str, str], fetch: Callable[[str, Path], None]
) -> Dataset:
    """Open the dataset with these hashes that was fetched before, or fetch it.

    `fetch` writes the file of a name to a path. Several processes may call this at once
    on one cache. Raises DamagedDataset if the fetched files have other hashes.
    """
    directory = cache_dir / f"fetched-{_key(hashes)[:16]}"
    if directory.exists():
        try:
            return _with(hashes, load(directory))
        except DamagedDataset as damage:
            warnings.warn(f"{damage.got}; fetching it again", stacklevel=2)
    with _workspace(cache_dir) as workspace:
        building = Path(workspace) / "dataset"
        building.mkdir()
        for name in (_MANIFEST, *hashes):
            check_relative(name)
            fetch(name, building / name)
        _with(hashes, load(building))
        _publish(building, directory)
    return load(directory)


def _with(hashes: Mapping[str, str], found: Dataset) -> Dataset:
    if found.hashes != hashes:
        raise _damaged(found.directory, "its files differ from the run's")
    return found


def files_of(found: Dataset) -> dict[str, Path]:
    """Return all files of a dataset by name, as `kept` fetches them."""
    return {name: found.directory / name for name in (_MANIFEST, *found.hashes)}


def _sources(wanted: Ingredients) -> Sources:
    def source(path: Path, option: str) -> corpus.Source:
        return corpus.files(path, wanted.column, option, format=wanted.format)

    aside = wanted.validation
    return Sources(
        tuple(source(path, wanted.option) for path in wanted.sources)
        or (corpus.offline(),),
        None if aside is None else source(aside, VALIDATION),
    )


def _recipe(
    sources: Sources, tokenizer: Path | None, vocab_size: int
) -> dict[str, Any]:
    recipe: dict[str, Any] = {"format": _FORMAT, "vocab_size": vocab_size}
    recipe["source"], *others = (source.identity for source in sources.train)
    if others:
        recipe["mixed_with"] = others
    if sources.validation is not None:
        recipe["validation"] = sources.validation.identity
    if tokenizer is not None:
        recipe["tokenizer"] = {
            path.name: corpus.content_hash(path) for path in _tokenizer_files(tokenizer)
        }
    return recipe


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in FILES if (folder / name).exists()]


def _copy_tokenizer(folder: Path, directory: Path) -> None:
    for path in _tokenizer_files(folder):
        shutil.copyfile(path, directory / path.name)


def load(directory: Path) -> Dataset:
    """Open a dataset directory after checking every hash.

    Raises DamagedDataset if a file is missing, changed or of another format.
    """
    try:
        manifest = json_value(read_bytes(directory / _MANIFEST))
        hashes = {name: manifest["sha256"][name] for name in _ARTEFACTS}
        hashes |= manifest["sha256"]
        for name in hashes:
            check_relative(name)
        sizes, counts = manifest["bytes"], manifest["tokens"]
        counts = manifest.get("learnt", counts)
        splits = [_sources_of(split, hashes) for split in ("train", "validation")]
        num_bytes, num_tokens = (
            sum(of[name] for name in splits[1]) for of in (sizes, counts)
        )
        bytes_per_token = float(num_bytes / num_tokens)
        found_format = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        what = f"{_MANIFEST}: {type(error).__name__}: {error}"
        raise _damaged(directory, what) from error
    if found_format != _FORMAT:
        raise _damaged(directory, f"format {found_format}, not {_FORMAT}")
    for name, expected in hashes.items():
        _check_hash(directory, name, expected)
    tokenizer = _tokenizer(directory, hashes)
    end = tokenizer.end_of_document
    trains, validations = (
        tuple(_tokens(directory, name, hashes, end) for name in names)
        for names in splits
    )
    return Dataset(
        directory=directory,
        trains=trains,
        validations=validations,
        tokenizer=tokenizer,
        bytes_per_token=bytes_per_token,
        hashes=hashes,
    )


def _sources_of(split: str, names: Container[str]) -> list[str]:
    """Return the stems of the split's files, one for each source."""
    every = (file_name(split, number) for number in count())
    return list(takewhile(lambda name: f"{name}.npy" in names, every))


def _tokens(directory: Path, split: str, names: Container[str], end: int) -> Tokens:
    def array(suffix: str = "") -> np.ndarray:
        return np.load(directory / f"{split}{suffix}.npy", mmap_mode="r")

    if f"{split}_starts.npy" not in names:
        return Tokens(array(), end=end)
    rows = Rows(
        starts_R=array("_starts"), first_R=array("_first"), learnt_T=array("_learnt")
    )
    return Tokens(array(), rows, end)


def _tokenizer(directory: Path, names: Container[str]) -> Tokenizer:
    if CONFIG in names:
        return read_tokenizer(directory).ids
    return load_tokenizer(directory / TOKENIZER)


def _check_hash(directory: Path, name: str, expected: str) -> None:
    try:
        found = corpus.content_hash(directory / name)
    except (OSError, Unreadable) as error:
        raise _damaged(directory, f"{name}: {error}") from error
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


def _write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    names = sorted(path.name for path in directory.iterdir())
    hashes = {name: corpus.content_hash(directory / name) for name in names}
    built_with = {
        "python": platform.python_version(),
        "tokenizers": importlib.metadata.version("tokenizers"),
    }
    manifest = {**facts, "sha256": hashes, "built_with": built_with}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _publish(building: Path, directory: Path) -> None:
    """Move the finished build into place, unless a sound dataset got there first."""
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
