# SPDX-License-Identifier: Apache-2.0
"""Reads the weights in a folder of Hugging Face as the parameters of our model.

Owns the check that all tensors of the model are there in the right shapes, and their
conversion to parameters. Does not own surplus tensors (`surplus.py`), nor which tensors
make up a parameter (`tensor_names.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.errors import BadInput, listed
from hetjax.models.hugging_face.adapter_config import base_folder
from hetjax.models.hugging_face.adapters_read import tensors_of
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.known_families import known_families
from hetjax.models.hugging_face.quantised_folders import check_tensors_are_whole
from hetjax.models.hugging_face.stored_tensors import Tensors
from hetjax.models.hugging_face.surplus import check_surplus
from hetjax.models.hugging_face.tensor_names import TensorPart, tensor_parts
from hetjax.models.model import Model, abstract_params

_DTYPES = ("BF16", "F16", "F32", "F64")
_DTYPES_IN_FILES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def check_tensors(tensors: Tensors, wanted: Mapping[str, TensorPart]) -> None:
    """Raise BadInput unless the folder has all tensors of the model, in right form."""
    there = tensors.places.keys()
    check_tensors_are_whole(
        tensors.folder, ((name, tensors.dtype(name)) for name in there)
    )
    if missing := sorted(wanted.keys() - there):
        raise BadInput(
            got=f"{str(tensors.folder)!r} lacks {listed(missing)}",
            allowed=f"the {len(wanted)} tensors that its config.json requires",
            fix="fetch the folder again, or correct its config.json",
        )
    for name, part in wanted.items():
        if (shape := tensors.shape(name)) != part.shape:
            raise BadInput(
                got=f"{str(tensors.folder)!r}: {name} of shape {list(shape)}",
                allowed=f"{list(part.shape)}, according to its config.json",
                fix="fetch the folder again, or correct its config.json",
            )
        if (dtype := tensors.dtype(name)) not in _DTYPES:
            raise BadInput(
                got=f"{str(tensors.folder)!r}: {name} in {dtype}",
                allowed=", ".join(_DTYPES),
                fix="give weights that are not quantised",
            )


class FolderWeights:
    """The parameters of a model in such a folder, each by its full path, in `dtype`.

    For a folder of PEFT they are those of its base, with the adapters added.
    The constructor checks that all are there. A call reads only the requested
    parameter. With `lets_go`, no file stays in memory once a parameter is read.
    """

    def __init__(
        self, folder: Path, dtype: Any = np.float32, *, lets_go: bool = False
    ) -> None:
        base = base_folder(folder)
        config, raw = read_config(base)
        self.dtype = np.dtype(dtype)
        self.lets_go = lets_go
        family = known_families()[raw["model_type"]]
        self._parts = tensor_parts(config, family.model_type)
        wanted = {part.name: part for each in self._parts.values() for part in each}
        self.tensors = tensors_of(folder, base, wanted)
        check_tensors(self.tensors, wanted)
        check_surplus(self.tensors, family, config, self.tensors.places.keys() - wanted)

    def check_model(self, model: Model) -> None:
        """Raise BadInput if the folder is of another model than this."""
        wanted = {
            f"{spec.path}.{name}": parameter.shape
            for spec in model.modules
            for name, parameter in abstract_params(
                replace(spec.unquantised, adapters=())
            ).items()
        }
        for path in [*wanted, *(self._parts.keys() - wanted.keys())]:
            ours, theirs = wanted.get(path), self._shape(path)
            if ours is None or theirs is None or not _holds(path, ours, theirs):
                raise BadInput(
                    got=f"weights of {str(self.tensors.folder)!r} for model "
                    f"{model.name}, whose {path} is {_shown(ours)}; the folder's is "
                    f"{_shown(theirs)}",
                    allowed="weights of the same model",
                    fix="give the folder also as the model",
                )

    def _shape(self, path: str) -> tuple[int, ...] | None:
        parts = self._parts.get(path)
        if parts is None:
            return None
        of_experts = () if parts[0].expert is None else (len(parts),)
        return *of_experts, *parts[0].ours

    def __call__(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the parameter in our shape; rows that pad the vocabulary are zero."""
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
        """Whether the tensor is the unchanged parameter, so that no copy is needed."""
        is_alone = part.expert is None and part.row.third is None
        same = self.tensors.dtype(part.name) == _DTYPES_IN_FILES.get(self.dtype.name)
        return is_alone and part.ours == shape and same


def _holds(path: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether our shape is theirs; a table of words may have more rows in ours."""
    is_table = path.endswith(".table") and ours[0] >= theirs[0]
    return ours == ((ours[0], *theirs[1:]) if is_table else theirs)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
