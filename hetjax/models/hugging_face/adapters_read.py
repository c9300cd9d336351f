# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a base with its adapters of PEFT added.

Owns which tensor of the base an adapter changes, and that each tensor of an adapter is
used or refused by name. Does not own the adapters' config (`adapter_config.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetjax.errors import BadInput, listed
from hetjax.models.hugging_face.adapter_config import (
    ADAPTERS,
    AdapterConfig,
    has_adapters,
    read_adapter_config,
)
from hetjax.models.hugging_face.own_head import HEAD
from hetjax.models.hugging_face.stored_tensors import Tensors, opened, spelled
from hetjax.models.hugging_face.tensor_names import TensorPart

_SUMMED = "F32"  # the dtype of a tensor that has an adapter
_NAME = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])(\.default)?\.weight$")
_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Adapter:
    """The term that is added to a weight (outputs, inputs): scale B A."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    transposed: bool  # the weight is stored as (inputs, outputs)

    def added(self) -> np.ndarray:
        delta = self.scale * (self.b @ self.a)
        return delta.T if self.transposed else delta


class AdaptedTensors(Tensors):
    """Tensors of a base with adapters added; those with an adapter are in fp32."""

    def __init__(self, base: Path, adapters: Mapping[str, _Adapter]) -> None:
        super().__init__(base)
        self._adapters = adapters

    def dtype(self, name: str) -> str:
        return _SUMMED if name in self._adapters else super().dtype(name)

    def read(self, name: str, third: int | None = None) -> np.ndarray:
        """Read one tensor, or a third of its last dim, with its adapter added."""
        value = super().read(name, third)
        if name not in self._adapters:
            return value
        added = self._adapters[name].added()
        if third is not None:
            added = np.split(added, 3, axis=-1)[third]
        return value.astype(np.float32) + added


def tensors_of(folder: Path, base: Path, parts: Mapping[str, TensorPart]) -> Tensors:
    """Return the tensors of a model's folder, or of a base with the folder's adapters.

    `parts` are those of the model by name. Raises BadInput for an adapter of anything
    but a linear weight of the model.
    """
    if not has_adapters(folder):
        return Tensors(folder)
    config = read_adapter_config(folder)
    linear = {
        name: part
        for name, part in parts.items()
        if part.row.inputs is not None or name == HEAD
    }
    found = {
        f"{module}.weight": _adapter(config, module, pair, linear)
        for module, pair in _pairs(folder).items()
    }
    return AdaptedTensors(base, found)


def _pairs(folder: Path) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Return A and B in fp32 by module; BadInput for other or unpaired tensors."""
    file = folder / ADAPTERS
    if not file.is_file():
        raise _bad(folder, f"without {ADAPTERS}")
    stored = opened(file)
    found: dict[str, dict[str, np.ndarray]] = {}
    others = []
    for name in sorted(stored.keys()):
        match = _NAME.match(name)
        if match is None or stored.get_slice(name).get_dtype() not in _DTYPES:
            others.append(name)
            continue
        module = spelled(f"{match[1]}.weight").removesuffix(".weight")
        value = stored.get_tensor(name).astype(np.float32)
        if match[2] in found.setdefault(module, {}):
            raise _bad(folder, f"with {name} twice")
        found[module][match[2]] = value
    if others:
        raise _bad(folder, f"with {listed(others)}")
    alone = [module for module, pair in found.items() if len(pair) < 2]
    if alone or not found:
        raise _bad(folder, f"without A or B of {listed(alone) or 'any weight'}")
    return found


def _adapter(
    config: AdapterConfig,
    module: str,
    pair: Mapping[str, np.ndarray],
    linear: Mapping[str, TensorPart],
) -> _Adapter:
    part, a, b = linear.get(f"{module}.weight"), pair["A"], pair["B"]
    if part is None:
        raise _bad(config.folder, f"for {module}, which their base does not have")
    transposed = part.row.inputs is not None and not part.row.transposed
    outputs_inputs = part.shape[::-1] if transposed else part.shape
    rank = config.rank_of(module)
    if a.shape != (rank, outputs_inputs[1]) or b.shape != (outputs_inputs[0], rank):
        raise _bad(
            config.folder,
            f"for {module} with A of shape {list(a.shape)}, B of {list(b.shape)}, rank "
            f"{rank} and a weight of {list(part.shape)}",
        )
    return _Adapter(a=a, b=b, scale=config.scale(module), transposed=transposed)


def _bad(folder: Path, got: str) -> BadInput:
    return BadInput(
        got=f"adapters in {str(folder)!r} {got}",
        allowed="A and B of linear weights of their base, as PEFT saves them",
        fix="merge them with PEFT, merge_and_unload().save_pretrained(FOLDER), and "
        "give that folder",
    )
