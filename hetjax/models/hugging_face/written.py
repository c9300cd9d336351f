# SPDX-License-Identifier: Apache-2.0
"""Writes our models as folders that transformers loads: `config.json`, safetensors.

Owns which file has which layers. Does not own which family describes a model of ours
(`known_families.py`), where values come from nor how a file is written
(`tensor_file.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hetjax.models.configs import DecoderConfig
from hetjax.models.decoders import model_of
from hetjax.models.hugging_face.configs import CONFIG
from hetjax.models.hugging_face.stored_tensors import INDEX, WHOLE
from hetjax.models.hugging_face.tensor_file import write_tensors
from hetjax.models.hugging_face.tensor_names import TensorPart, tensor_parts
from hetjax.models.model import abstract_params

FILE_BYTES = 4 * 2**30  # limit of a file, unless one layer is larger
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

Read = Callable[[str, tuple[int, ...]], np.ndarray]  # by full path and shape
Named = dict[str, np.ndarray]


def write_model(
    folder: Path,
    config: DecoderConfig,
    fields: Mapping[str, Any],
    read: Read,
    dtype: str,
    written: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write a model's sizes and weights into an existing folder.

    `fields` are those of its `config.json`, `dtype` is that of the weights. `written`
    is called after each file, with its number and the number of files.
    """
    files = _files(config, fields["model_type"], DTYPES[dtype].itemsize)
    where: dict[str, str] = {}
    total_bytes = 0
    for number, parts in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = WHOLE if len(files) == 1 else name
        shapes = {part.name: part.shape for each in parts.values() for part in each}
        values = _tensors(config, parts, read)
        total_bytes += write_tensors(folder / name, shapes, DTYPES[dtype], values)
        where |= dict.fromkeys(shapes, name)
        written(number, len(files))
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    said = {**fields, "dtype": dtype, "torch_dtype": dtype}
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")


def _files(
    config: DecoderConfig, model_type: str, item_bytes: int
) -> list[dict[str, list[TensorPart]]]:
    """Return the parameters of each file: whole layers, as many as fit."""
    found: list[dict[str, list[TensorPart]]] = []
    size_bytes = 0
    by_path = tensor_parts(config, model_type).items()
    for _, group in groupby(by_path, lambda each: each[0].partition(".")[0]):
        layer = dict(group)
        parts = [part for each in layer.values() for part in each]
        added_bytes = item_bytes * sum(int(np.prod(part.ours)) for part in parts)
        if not found or size_bytes + added_bytes > FILE_BYTES:
            found.append({})
            size_bytes = 0
        found[-1] |= layer
        size_bytes += added_bytes
    return found


def _tensors(
    config: DecoderConfig, parts: Mapping[str, list[TensorPart]], read: Read
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors of Hugging Face by name, as views of our parameters.

    If the caller lets go of tensors, one parameter is in memory at a time: its last
    tensor is not held here while the next parameter is read.
    """
    shapes = {
        f"{spec.path}.{name}": parameter.shape
        for spec in model_of(config).modules
        for name, parameter in abstract_params(spec).items()
    }
    thirds: dict[str, dict[int, np.ndarray]] = {}
    for path, each in parts.items():
        value = read(path, shapes[path])
        for part in each:
            own = value if part.expert is None else value[part.expert]
            if part.row.third is None:
                yield part.name, part.write(own[: part.ours[0]])
                continue
            of = thirds.setdefault(part.name, {})
            of[part.row.third] = part.write(own[: part.ours[0]])
            if len(of) == 3:
                del thirds[part.name]
                yield part.name, np.concatenate([of.pop(0), of.pop(1), of.pop(2)], -1)
        del value, own
