# SPDX-License-Identifier: Apache-2.0
"""Checks the tensors of a Hugging Face folder that its config does not require.

Owns what happens to each. Constants (RoPE frequencies, or others that a family knows)
are compared by value; vision towers are left out with a warning; all others are refused
by name. Does not own heads that should be tied (`own_head.py`).
"""

import re
import warnings
from collections.abc import Iterable, Iterator

import numpy as np

from hetjax.errors import BadInput, listed
from hetjax.models.configs import DecoderConfig, LlamaConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.hugging_face.own_head import HEAD
from hetjax.models.hugging_face.stored_tensors import Tensors
from hetjax.models.positions import frequencies

_FREQUENCIES = re.compile(r"^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")
_TOWERS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
_ROUNDING = 1e-2  # relative, of frequencies that were stored in bfloat16


def check_surplus(
    tensors: Tensors, family: Family, config: DecoderConfig, surplus: Iterable[str]
) -> None:
    """Raise BadInput for tensors that a model of this config would have to use.

    Warns of left-out tensors that are not constants.
    """
    refused, towers = [], []
    for name in sorted(surplus):
        if name == HEAD and config.tied:  # `has_own_head` found it equal
            continue
        if _TOWERS.match(name) and family.with_eyes:
            towers.append(name)
        elif not _is_constant(tensors, family, config, name):
            refused.append(name)
    if refused:
        raise BadInput(
            got=f"{str(tensors.folder)!r} with unexpected tensors {listed(refused)}",
            allowed="the tensors that its config.json requires, and constants that "
            "follow from it",
            fix="fetch the folder again, or correct its config.json",
        )
    if towers:
        warnings.warn(
            f"{tensors.folder}: {len(towers)} tensors of the vision part are ignored; "
            "hetjax uses only the text model",
            stacklevel=2,
        )


def _is_constant(
    tensors: Tensors, family: Family, config: DecoderConfig, name: str
) -> bool:
    """Whether the tensor is a constant of the config; warns if its values differ."""
    if family.is_constant is not None:
        return family.is_constant(name, lambda: tensors.read(name))
    if not _FREQUENCIES.match(name) or not isinstance(config, LlamaConfig):
        return False
    found = tensors.read(name).astype(np.float32)
    if not any(_close(found, expected) for expected in _frequencies(config)):
        warnings.warn(
            f"{tensors.folder}: {name} differs from what rope_theta in config.json "
            "gives; RoPE follows config.json",
            stacklevel=2,
        )
    return True


def _frequencies(config: LlamaConfig) -> Iterator[np.ndarray]:
    """Yield the RoPE frequencies of each kind of block, with and without scaling."""
    for theta in {config.rope_theta, config.window_rope_theta or config.rope_theta}:
        for scaling in {None, config.rope_scaling}:
            yield np.asarray(frequencies(config.size_of_heads, theta, scaling))


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and np.allclose(
        found, expected, rtol=_ROUNDING, atol=0
    )
