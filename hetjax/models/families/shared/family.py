# SPDX-License-Identifier: Apache-2.0
"""Defines a family of Hugging Face: all that a file of `families/` declares about it.

Each of these files has one `FAMILY`, which `known_families.py` finds; none needs JAX.
Does not own folders and files of weights (`hugging_face/`), nor the modules of blocks
(`decoders.py` lays out a config).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetjax.models.configs import DecoderConfig, LlamaConfig
from hetjax.models.families.shared.fields import Fields, Kind
from hetjax.models.families.shared.tensor_rows import TensorTable

IsConstant = Callable[[str, Callable[[], np.ndarray]], bool]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family by its `model_type`; `architecture` is its class in transformers."""

    model_type: str
    architecture: str
    read: Callable[[Fields], DecoderConfig]
    """Reads sizes and blocks from the fields of a `config.json`. Refuses fields that
    would change a model's numbers in a way that our models do not support."""
    write: Callable[[Any], dict[str, Any] | None]
    """Makes the fields of a config of ours, None for one that is not of the family. A
    config that `read` would read back as another model is not of the family, either."""
    tensors: TensorTable
    config: type[DecoderConfig] = LlamaConfig
    """The class of configs that the family reads and writes."""
    examples: Mapping[str, Mapping[str, Any]]
    """Tiny models that show what is special to the family: fields besides sizes, by
    name. Tests build them with transformers, and compare ours with them."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """The kinds of fields that no other family has."""
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of transformers for missing fields, where `read` has other defaults.
    A null field is not missing."""
    without_effect: tuple[str, ...] = ()
    """Fields that do not change the model's numbers."""
    with_eyes: str | None = None
    """The `model_type` of models with vision whose text part is this family. The vision
    part is left out."""
    is_constant: IsConstant | None = None
    """Whether a tensor that `tensors` lacks follows from the config, given its name and
    a function that reads its value. None: RoPE frequencies follow."""

    def fields(self, raw: Mapping[str, Any], name: str) -> Fields:
        """Return the fields of the model of that name, defaults included."""
        found = Fields({**self.left_out, **raw}, name, self.kinds)
        found.without_effect(*self.without_effect)
        return found
