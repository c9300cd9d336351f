# SPDX-License-Identifier: Apache-2.0
"""What a folder of Hugging Face stores besides the tensors that its config asks for.

Owns what happens to each: constants (masks, rotation frequencies) are compared by
value; towers for images are left out with a warning; all else is refused by name. Does
not own heads that should be tied (`own_head.py`).
"""

import re
import warnings
from collections.abc import Iterable, Iterator

import numpy as np

from hetjax.errors import BadInput
from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig
from hetjax.models.hugging_face.own_head import HEAD
from hetjax.models.hugging_face.stored_tensors import Tensors, listed
from hetjax.models.positions import frequencies

_MASK = re.compile(r"^transformer\.h\.\d+\.attn\.bias$")
_MASKED = re.compile(r"^transformer\.h\.\d+\.attn\.masked_bias$")
_FREQUENCIES = re.compile(r"^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")
_TOWERS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
_MOST_MASKED = -1e4  # what is added to scores of positions that are not to be seen
_ROUNDING = 1e-2  # of frequencies that were kept in bfloat16


def check_surplus(
    tensors: Tensors, config: DecoderConfig, surplus: Iterable[str]
) -> None:
    """BadInput for tensors that a model of this config would have to use.

    Warns of those that it leaves out though they say something.
    """
    refused, towers = [], []
    for name in sorted(surplus):
        if name == HEAD and config.tied:  # `has_own_head` found it equal
            continue
        if _TOWERS.match(name) and _can_see(config):
            towers.append(name)
        elif not _is_constant(tensors, config, name):
            refused.append(name)
    if refused:
        raise BadInput(
            got=f"{str(tensors.folder)!r} has besides {listed(refused)}",
            allowed="the tensors that its config.json asks for, and constants that "
            "follow from it",
            fix="fetch the folder again, or put its config.json right",
        )
    if towers:
        warnings.warn(
            f"{tensors.folder}: {len(towers)} tensors of what sees images are left "
            "out; the model is one of text",
            stacklevel=2,
        )


def _can_see(config: DecoderConfig) -> bool:
    """Whether its family has members with a tower for images: Gemma 3."""
    return isinstance(config, LlamaConfig) and config.norms == "around"


def _is_constant(tensors: Tensors, config: DecoderConfig, name: str) -> bool:
    """Whether the tensor follows from the config; warns where its values do not."""
    if isinstance(config, GPTConfig):
        return _is_mask(tensors, name)
    if not _FREQUENCIES.match(name) or not isinstance(config, LlamaConfig):
        return False
    found = tensors.read(name).astype(np.float32)
    if not any(_close(found, expected) for expected in _frequencies(config)):
        warnings.warn(
            f"{tensors.folder}: {name} differs from what rope_theta in config.json "
            "gives; positions turn as config.json says",
            stacklevel=2,
        )
    return True


def _is_mask(tensors: Tensors, name: str) -> bool:
    """Whether it is GPT-2's mask of what is to come, or what is put in its place."""
    if _MASKED.match(name):
        return bool(np.all(tensors.read(name).astype(np.float32) <= _MOST_MASKED))
    if not _MASK.match(name):
        return False
    mask = tensors.read(name)
    return np.array_equal(mask, np.broadcast_to(np.tri(mask.shape[-1]), mask.shape))


def _frequencies(config: LlamaConfig) -> Iterator[np.ndarray]:
    """Those of its kinds of blocks, with and without scaling."""
    for theta in {config.rope_theta, config.window_rope_theta or config.rope_theta}:
        for scaling in {None, config.rope_scaling}:
            yield np.asarray(frequencies(config.size_of_heads, theta, scaling))


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and np.allclose(
        found, expected, rtol=_ROUNDING, atol=0
    )
