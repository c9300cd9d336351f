# SPDX-License-Identifier: Apache-2.0
"""What a family of Hugging Face is: all that a file of `families/` says of its own.

Each of these files has one `FAMILY`, and finds itself (`known_families.py`); none needs
JAX. Does not own folders and files of weights (`hugging_face/`), nor the modules that
blocks are made of (`decoders.py` lays out what a config says).
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
    """Sizes and blocks by the fields of a `config.json`; what would change a model's
    numbers and is not ours it refuses."""
    write: Callable[[Any], dict[str, Any] | None]
    """The fields of a config of ours, None for one that is not of the family; one that
    it would read as another model is not, either."""
    tensors: TensorTable
    config: type[DecoderConfig] = LlamaConfig
    """The class of configs that it reads and writes."""
    examples: Mapping[str, Mapping[str, Any]]
    """Tiny models that show what is its own: fields besides sizes, by a name. Tests
    make them with transformers, and hold ours against them."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """What fields have to be that no other family has."""
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that are left out, where that is not what
    `read` does; null is no field that is left out."""
    without_effect: tuple[str, ...] = ()
    """Fields that change no number."""
    with_eyes: str | None = None
    """The `model_type` of models of which this family is the part that reads; what
    sees is left out."""
    is_constant: IsConstant | None = None
    """Whether a tensor that `tensors` has not, by its name and what reads its value,
    follows from the config. None: those of rotary positions are."""

    def fields(self, raw: Mapping[str, Any], name: str) -> Fields:
        """The fields of a model of that name, with those that are left out."""
        found = Fields({**self.left_out, **raw}, name, self.kinds)
        found.without_effect(*self.without_effect)
        return found
