# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors that a folder of Hugging Face stores, whichever file has them.

Owns which file has which tensor, that no more than the requested bytes are read, and
that a tensor that is stored twice has one value. Does not own which tensors a model
needs (`tensors.py`). Imports no JAX.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors reads bfloat16 by it
import numpy as np
from safetensors import SafetensorError, safe_open

from hetjax.errors import BadInput, listed
from hetjax.files.mirrors import Bring, who_brings
from hetjax.files.parsing import read_json
from hetjax.files.reading import Unreadable
from hetjax.files.tensor_header import TensorInfo, data_start, tensor_header

WHOLE = "model.safetensors"  # all weights in one file; else INDEX lists the files
INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255  # bytes
_COMPARED_BYTES = 2**24  # of each of two tensors, compared at once
# names that other exporters write -> names in our tables
_SPELLINGS = (
    (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(?=(h\.\d+|wte|wpe|ln_f)\.)"), "transformer."),
    (re.compile(r"^(?=(layers\.\d+|embed_tokens|norm)\.)"), "model."),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    file: Path
    name: str  # as the file spells it


class Tensors:
    """The tensors of a folder by name; `num_bytes` counts the bytes that were read."""

    def __init__(self, folder: Path) -> None:
        """Open no file yet; `places` raises BadInput for missing weights or files."""
        self.folder = folder
        self.num_bytes = 0
        self._files: dict[Path, Any] = {}

    @cached_property
    def places(self) -> Mapping[str, _Place]:
        """The place of each tensor, by its name in our tables.

        Raises BadInput for two tensors of one name, in two files or in two spellings,
        that differ.
        """
        found: dict[str, _Place] = {}
        for file in _files(self.folder):
            for name in self._file(file).keys():
                place = _Place(file=file, name=name)
                first = found.setdefault(spelled(name), place)
                if first != place and not self._equal(first, place):
                    raise BadInput(
                        got=f"{str(self.folder)!r} with {first.name} in "
                        f"{first.file.name} and a different {place.name} in "
                        f"{place.file.name}",
                        allowed="one value for each tensor",
                        fix="remove the file that does not belong to the model, or "
                        "fetch the folder again",
                    )
        self._check_index(found)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(self.places[name]).get_shape())

    def dtype(self, name: str) -> str:
        return self._slice(self.places[name]).get_dtype()

    def read(self, name: str, third: int | None = None) -> np.ndarray:
        """Read one tensor, or a third of its last dim, and no other bytes."""
        kept = self._slice(self.places[name])
        size = kept.get_shape()[-1] // 3 if third is not None else 0
        start = size * (third or 0)
        value: np.ndarray = kept[..., start : start + size] if size else kept[...]
        self.num_bytes += value.nbytes
        return value

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and, in fp32, the same values."""
        return self._equal(self.places[one], self.places[other])

    def let_go(self) -> None:
        """Close the files, so that their pages leave memory."""
        self._files.clear()

    def _equal(self, one: _Place, other: _Place) -> bool:
        a, b = self._slice(one), self._slice(other)
        if a.get_shape() != b.get_shape():
            return False
        if not a.get_shape():
            return bool(np.array_equal(a[...], b[...]))
        return all(
            np.array_equal(a[rows].astype(np.float32), b[rows].astype(np.float32))
            for rows in _row_slices(a.get_shape())
        )

    def _slice(self, place: _Place) -> Any:
        """Return a tensor that is not read yet."""
        return self._file(place.file).get_slice(place.name)

    def _file(self, path: Path) -> Any:
        """Return an open file of safetensors, whose header is read once."""
        if path not in self._files:
            self._files[path] = opened(path)
        return self._files[path]

    def _check_index(self, found: Mapping[str, _Place]) -> None:
        for name, file in _index(self.folder).items():
            if spelled(name) not in found:
                raise BadInput(
                    got=f"{str(self.folder / file)!r} without {name}, which {INDEX} "
                    "says it has",
                    allowed="files with the tensors that their index names",
                    fix="fetch the folder again",
                )


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights in safetensors, or an index of such weights."""
    return any((folder / name).is_file() for name in (WHOLE, INDEX))


def opened(path: Path) -> Any:
    """Open a file of safetensors. Raises BadInput if it is not one, or not whole."""
    try:
        header, bring = tensor_header(path), who_brings(path)
        found = safe_open(path, framework="np")
        if bring is None:
            return found
        return _PartlyHere(found, header, data_start(path), bring)
    except Unreadable:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(
            got=f"{str(path)!r}: {error}",
            allowed="a complete file of safetensors",
            fix="fetch it again",
        ) from None


@dataclass(frozen=True, slots=True)
class _PartlyHere:
    """A partial file: each tensor is fetched before it is read."""

    found: Any
    header: Mapping[str, TensorInfo]
    start: int  # offset of the tensors' bytes
    bring: Bring

    def keys(self) -> Iterable[str]:
        return self.found.keys()

    def get_tensor(self, name: str) -> np.ndarray:
        self.bring(*self.bytes_of(name))
        return self.found.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        return _BroughtSlice(self, name, self.found.get_slice(name))

    def bytes_of(self, name: str) -> tuple[int, int]:
        tensor = self.header[name]
        return self.start + tensor.start, self.start + tensor.end


@dataclass(frozen=True, slots=True)
class _BroughtSlice:
    """A tensor of a `_PartlyHere` file that is not read yet."""

    file: _PartlyHere
    name: str
    found: Any

    def get_shape(self) -> list[int]:
        return self.found.get_shape()

    def get_dtype(self) -> str:
        return self.found.get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        self.file.bring(*self.file.bytes_of(self.name))
        return self.found[index]


def spelled(name: str) -> str:
    """Return the name of a tensor as our tables spell it."""
    for pattern, ours in _SPELLINGS:
        name = pattern.sub(ours, name)
    return name


def _row_slices(shape: list[int]) -> Iterator[slice]:
    row_bytes = 4 * max(1, int(np.prod(shape[1:])))
    step = max(1, _COMPARED_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _files(folder: Path) -> Iterable[Path]:
    """Return the files of weights: the single file, and those that an index names."""
    names = sorted(set(_index(folder).values()))
    if (folder / WHOLE).is_file():
        names = sorted({WHOLE, *names})
    if not names:
        raise _no_weights(folder)
    for name in names:
        if not (folder / name).is_file():
            raise BadInput(
                got=f"{str(folder)!r} without {name}, which its index names",
                allowed=f"all {len(names)} files of the model's weights",
                fix="fetch the folder again",
            )
    return [folder / name for name in names]


def _index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; nothing if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    fix = "fetch the folder again"
    found = read_json(index, what="index of weights", fix=fix)
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(map(_is_file_name, files.values())):
        raise BadInput(
            got=f"{str(index)!r} without a weight_map of tensors to files",
            allowed="the index of a model's weights, as Hugging Face writes it",
            fix=fix,
        )
    return {name: Path(file).name for name, file in files.items()}


def _is_file_name(found: Any) -> bool:
    """Whether the value can be the name of a file on most file systems."""
    is_text = isinstance(found, str) and found.isprintable()
    return is_text and len(found.encode()) <= _LONGEST_NAME


def _no_weights(folder: Path) -> BadInput:
    others = [*folder.glob("*.bin"), *folder.glob("*.gguf")]
    has = f"; it has {listed(sorted(p.name for p in others))}" if others else ""
    return BadInput(
        got=f"{str(folder)!r} without {WHOLE} or {INDEX}{has}",
        allowed="a folder with the weights of a model in safetensors",
        fix="save it with transformers: save_pretrained(FOLDER)",
    )
