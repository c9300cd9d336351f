# SPDX-License-Identifier: Apache-2.0
"""Weights in a folder of Hugging Face: safetensors, in one file or in several.

Owns which file has which tensor, that all a model needs are there in the right shapes,
and that no more is read than what is asked for. Does not own which tensors those are
(`tensor_names.py`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hetjax.errors import BadInput
from hetjax.models.hugging_face.configs import INDEX, WHOLE, read_config
from hetjax.models.hugging_face.tensor_names import TensorPart, tensor_parts
from hetjax.models.model import Model, abstract_params

_DTYPES = ("BF16", "F16", "F32", "F64")
_TOLD = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NAMED = 3  # of many tensors that are missing, so many are named
# names as other exporters write them -> as the tables have them
_SPELLINGS = (
    (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(?=(h\.\d+|wte|wpe|ln_f)\.)"), "transformer."),
)
# masks and constants, and what belongs to eyes
_NO_WEIGHTS = re.compile(
    r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$|vision_tower\.|multi_modal_projector\."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    file: Path
    name: str  # as the file spells it


class Tensors:
    """The tensors of a folder by name; `num_bytes` counts those that were read."""

    def __init__(self, folder: Path) -> None:
        """BadInput where there are none, or where a file of them is missing."""
        self.folder = folder
        self.num_bytes = 0
        self._files: dict[Path, Any] = {}

    @cached_property
    def places(self) -> Mapping[str, _Place]:
        found: dict[str, _Place] = {}
        for file, names in _files(self.folder):
            for name in names:
                if not _NO_WEIGHTS.search(name):
                    found[_spelled(name)] = _Place(file=file, name=name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def read(self, name: str, third: int | None = None) -> np.ndarray:
        """Read one tensor, or a third of its last dim, and no other bytes."""
        kept = self._slice(name)
        size = kept.get_shape()[-1] // 3 if third is not None else 0
        start = size * (third or 0)
        value: np.ndarray = kept[..., start : start + size] if size else kept[:]
        self.num_bytes += value.nbytes
        return value

    def let_go(self) -> None:
        """Close the files: what was read of them is in memory no more."""
        self._files.clear()

    def _slice(self, name: str) -> Any:
        """A tensor that is not read yet, of a file whose header is read once."""
        place = self.places[name]
        if place.file not in self._files:
            self._files[place.file] = _opened(place.file)
        try:
            return self._files[place.file].get_slice(place.name)
        except SafetensorError:
            raise BadInput(
                got=f"{str(place.file)!r} without {place.name}, which {INDEX} says it "
                "has",
                allowed="files with the tensors that their index names",
                fix="fetch the folder again",
            ) from None


def check_tensors(tensors: Tensors, parts: Mapping[str, list[TensorPart]]) -> None:
    """BadInput unless the folder has all tensors of the model, and no others.

    A head of its own is no more where the model's is tied.
    """
    wanted = {part.name: part for each in parts.values() for part in each}
    there = tensors.places.keys()
    missing = sorted(wanted.keys() - there)
    extra = sorted(there - wanted.keys() - {"lm_head.weight"})
    for what, names in (("lacks", missing), ("has besides", extra)):
        if names:
            raise BadInput(
                got=f"{str(tensors.folder)!r} {what} {_listed(names)}",
                allowed=f"the {len(wanted)} tensors that its config.json asks for",
                fix="fetch the folder again, or put its config.json right",
            )
    for name, part in wanted.items():
        if (shape := tensors.shape(name)) != part.shape:
            raise BadInput(
                got=f"{str(tensors.folder)!r}: {name} of shape {list(shape)}",
                allowed=f"{list(part.shape)}, by its config.json",
                fix="fetch the folder again, or put its config.json right",
            )
        if (dtype := tensors.dtype(name)) not in _DTYPES:
            raise BadInput(
                got=f"{str(tensors.folder)!r}: {name} in {dtype}",
                allowed=", ".join(_DTYPES),
                fix="give weights that are not quantised",
            )


class FolderWeights:
    """The parameters of a model, each by its full path, in `dtype`, from such a folder.

    Made, it has checked that all are there; it reads no more than what is asked for.
    One that `lets_go` keeps no file in memory once a parameter is read.
    """

    def __init__(
        self, folder: Path, dtype: Any = np.float32, *, lets_go: bool = False
    ) -> None:
        config, raw = read_config(folder)
        self.dtype = np.dtype(dtype)
        self.lets_go = lets_go
        self.tensors = Tensors(folder)
        self._parts = tensor_parts(config, raw["model_type"])
        check_tensors(self.tensors, self._parts)

    def check_model(self, model: Model) -> None:
        """BadInput if the folder is of another model than this."""
        for spec in model.modules:
            own = replace(spec.unquantised, adapters=())
            for name, parameter in abstract_params(own).items():
                path = f"{spec.path}.{name}"
                there = self._shape(path)
                padded = there and (parameter.shape[0], *there[1:])
                larger = there and parameter.shape[0] >= there[0]
                if not larger or padded != parameter.shape:
                    raise BadInput(
                        got=f"weights of {str(self.tensors.folder)!r} for model "
                        f"{model.name}, whose {path} is {list(parameter.shape)} and "
                        f"theirs {list(there) if there else 'missing'}",
                        allowed="weights of the same model",
                        fix="give the folder as the model, too",
                    )

    def _shape(self, path: str) -> tuple[int, ...] | None:
        parts = self._parts.get(path)
        if parts is None:
            return None
        of_experts = () if parts[0].expert is None else (len(parts),)
        return *of_experts, *parts[0].ours

    def __call__(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """Give the parameter in our shape; rows that pad the vocabulary are zero."""
        found = self._read(self._parts[path], shape)
        if self.lets_go:
            self.tensors.let_go()
        return found

    def _read(self, parts: list[TensorPart], shape: tuple[int, ...]) -> np.ndarray:
        if self._is_whole(parts[0], shape):
            return parts[0].read(self.tensors.read(parts[0].name))
        found = np.zeros(shape, self.dtype)
        for part in parts:
            own = found if part.expert is None else found[part.expert]
            theirs = self.tensors.read(part.name, part.row.third)
            own[: part.ours[0]] = part.read(theirs)
        return found

    def _is_whole(self, part: TensorPart, shape: tuple[int, ...]) -> bool:
        """Whether the tensor is the parameter as it is, so that no copy is made."""
        is_alone = part.expert is None and part.row.third is None
        same = self.tensors.dtype(part.name) == _TOLD.get(self.dtype.name)
        return is_alone and part.ours == shape and same


def _files(folder: Path) -> Iterable[tuple[Path, list[str]]]:
    """The files of weights, and which tensors each has."""
    index = folder / INDEX
    if not index.is_file():
        whole = folder / WHOLE
        if not whole.is_file():
            raise _no_weights(folder)
        with _opened(whole) as file:
            yield whole, list(file.keys())
        return
    try:
        told = json.loads(index.read_text())["weight_map"]
        named = {name: Path(file).name for name, file in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            got=f"{str(index)!r} that cannot be read",
            allowed="the index of a model's weights, as Hugging Face writes it",
            fix="fetch the folder again",
        ) from None
    for file in sorted(set(named.values())):
        path = folder / file
        if not path.is_file():
            raise BadInput(
                got=f"{str(folder)!r} without {path.name}, which its index names",
                allowed=f"all {len(set(named.values()))} files of the model's weights",
                fix="fetch the folder again",
            )
        yield path, [name for name, where in named.items() if where == file]


def _no_weights(folder: Path) -> BadInput:
    others = sorted(p.name for p in folder.glob("*.bin")) if folder.is_dir() else []
    has = f"; it has {_listed(others)}" if others else ""
    return BadInput(
        got=f"{str(folder)!r} without {WHOLE} or {INDEX}{has}",
        allowed="a folder with the weights of a model in safetensors",
        fix="save it with transformers: save_pretrained(FOLDER)",
    )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (OSError, SafetensorError) as error:
        raise BadInput(
            got=f"{str(path)!r}: {error}",
            allowed="a whole file of safetensors",
            fix="fetch it again",
        ) from None


def _spelled(name: str) -> str:
    for pattern, ours in _SPELLINGS:
        name = pattern.sub(ours, name)
    return name


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
