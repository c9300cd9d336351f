# SPDX-License-Identifier: Apache-2.0
"""Maps each parameter of ours to its place and shape in a Hugging Face checkpoint.

Owns their shapes and ours, and the conversion between them. Only our tables have rows
that pad the vocabulary. Does not own which tensor is which parameter (`families/`) nor
files (`tensors.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetjax.models.configs import DecoderConfig
from hetjax.models.decoders import model_of
from hetjax.models.families.shared.tensor_rows import TensorRow
from hetjax.models.hugging_face.known_families import known_families
from hetjax.models.model import abstract_params

Shape = tuple[int, ...]
_OF_WORDS = ("embedding.table", "head.table")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The place of our parameter, or of one expert of it: a tensor, or a third of it.

    `shape` is that of their tensor, `ours` that of the part of our parameter.
    """

    name: str
    shape: Shape
    ours: Shape
    row: TensorRow
    expert: int | None = None

    def read(self, value: np.ndarray) -> np.ndarray:
        """Return our part, a view of their value (or of its third)."""
        if self.row.inputs is not None and self.row.transposed:
            value = value.T
        return value.reshape(self.ours)

    def write(self, value: np.ndarray) -> np.ndarray:
        """Return our part in their layout: only its third if theirs holds three."""
        if self.row.inputs is None:
            third = self.row.third is not None
            return value.reshape(-1) if third else value.reshape(self.shape)
        matrix = value.reshape(math.prod(self.ours[: self.row.inputs]), -1)
        return matrix.T if self.row.transposed else matrix


def tensor_parts(config: DecoderConfig, model_type: str) -> dict[str, list[TensorPart]]:
    """Return the place of each parameter of the model, by its full path.

    A parameter of experts has one part for each expert, in order.
    """
    table = known_families()[model_type].tensors
    found: dict[str, list[TensorPart]] = {}
    for spec in model_of(config).modules:
        block, _, module = spec.path.partition(".")
        for name, parameter in abstract_params(spec).items():
            path, shape = f"{spec.path}.{name}", parameter.shape
            if row := table.ends.get(path):
                if path in _OF_WORDS:  # ours also has rows of padding
                    shape = config.vocab_size, shape[1]
                found[path] = [_part(row, row.theirs, shape)]
                continue
            row = table.block[f"{module}.{name}"]
            number = int(block.removeprefix("block_"))
            theirs = table.prefix.format(b=number) + row.theirs
            found[path] = list(_of_block(row, theirs, shape))
    return found


def _of_block(row: TensorRow, theirs: str, shape: Shape) -> Iterator[TensorPart]:
    if "{e}" not in row.theirs:
        yield _part(row, theirs, shape)
        return
    for expert in range(shape[0]):
        name = theirs.replace("{e}", str(expert))
        yield _part(row, name, shape[1:], expert=expert)


def _part(row: TensorRow, name: str, shape: Shape, **own: Any) -> TensorPart:
    theirs = shape
    if row.inputs is not None:
        ends = math.prod(shape[: row.inputs]), math.prod(shape[row.inputs :])
        theirs = ends[::-1] if row.transposed else ends
    elif row.third is not None:
        theirs = (math.prod(shape),)
    elif len(shape) == 2 and name.endswith(".bias"):
        theirs = (math.prod(shape),)
    if row.third is not None:
        theirs = *theirs[:-1], 3 * theirs[-1]
    return TensorPart(name=name, shape=theirs, ours=shape, row=row, **own)
