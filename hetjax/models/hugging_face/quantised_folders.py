# SPDX-License-Identifier: Apache-2.0
"""Refuses folders of Hugging Face with quantised weights, and names the method.

Owns how the method is found: by `quantization_config`, or by names and dtypes of
tensors. Such weights cannot be trained; hetjax quantises the model that they were made
from by itself (`--lora.frozen`). Imports no JAX.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput

SETTINGS = "quantization_config"
_NAMES = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
# names that only tensors of the method have; the first match counts
_SIGNS = (
    (
        "bitsandbytes",
        re.compile(r"\.(absmax|quant_map|nested_absmax|SCB)$|\.quant_state\."),
    ),
    ("GPTQ", re.compile(r"\.g_idx$")),
    ("AWQ or GPTQ", re.compile(r"\.(qweight|qzeros)$")),
    ("MXFP4", re.compile(r"_blocks$")),
    ("compressed-tensors", re.compile(r"\.(weight_packed|weight_shape)$")),
    ("FP8", re.compile(r"\.(weight_scale|weight_scale_inv|input_scale)$")),
)
_OF_8_BITS = re.compile(r"^F8_")


def check_settings(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise BadInput if a `config.json` says how its weights are quantised."""
    settings = fields.get(SETTINGS) or fields.get("compression_config")
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    raise _refused(
        folder, _method(settings, str(method)), f"according to its {SETTINGS}"
    )


def check_tensors_are_whole(folder: Path, tensors: Iterable[tuple[str, str]]) -> None:
    """Raise BadInput if names or dtypes of tensors show that they are quantised."""
    named = list(tensors)
    for method, sign in _SIGNS:
        if found := next((name for name, _ in named if sign.search(name)), None):
            raise _refused(folder, method, f"according to its tensor {found}")
    for name, dtype in named:
        if _OF_8_BITS.match(dtype):
            raise _refused(folder, "FP8", f"according to its tensor {name} in {dtype}")


def _method(settings: Any, method: str) -> str:
    name = _NAMES.get(method, repr(method))
    if method == "bitsandbytes":
        bits = "8" if settings.get("load_in_8bit") else "4"
        return f"{name} ({bits} bits)"
    return name


def _refused(folder: Path, method: str, how: str) -> BadInput:
    return BadInput(
        got=f"{str(folder)!r}, whose weights are quantised with {method}, {how}",
        allowed="weights in float32, bfloat16 or float16",
        fix="give the folder of the unquantised model; to train that in 4 bits: "
        "hetjax train FOLDER --lora.rank 16 --lora.frozen nf4",
    )
