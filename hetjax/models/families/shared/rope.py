# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the RoPE fields of a `config.json`.

Owns the fields of transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`). Does not own the rotation (`positions.py`).
"""

from typing import Any

from hetjax.errors import BadInput
from hetjax.models.configs import RopeScaling
from hetjax.models.families.shared.fields import Fields

_THETA = 10_000.0


def rope_fields(fields: Fields) -> Fields:
    """Return the object with the RoPE fields, under either name."""
    names = "rope_parameters", "rope_scaling"
    fields.without_effect(*names)
    return fields.part(names[0] if fields.get(names[0]) else names[1])


def read_rope(fields: Fields, theta: float | None) -> tuple[float, RopeScaling | None]:
    """Return the RoPE base and its scaling, of one kind of blocks (Gemma has two)."""
    base: float = fields.get("rope_theta") or theta or _THETA
    kinds = fields.get("rope_type"), fields.get("type")
    kind = kinds[0] or kinds[1] or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling(kind="linear", factor=fields["factor"])
    if kind == "llama3":
        return base, RopeScaling(
            kind="llama3",
            factor=fields["factor"],
            low_turns=fields["low_freq_factor"],
            high_turns=fields["high_freq_factor"],
            original_positions=fields["original_max_position_embeddings"],
        )
    raise BadInput(
        got=f"model {fields.name!r}: rope_type {kind!r}",
        allowed="default, linear, llama3",
        fix="give a model with one of these, or remove the scaling from its "
        "config.json if your sequences are no longer than those of its pretraining",
    )


def written_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the fields of both versions of transformers."""
    written: dict[str, Any] | None = None
    if scaling is not None:
        written = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        written = {
            **(written or {}),
            "low_freq_factor": scaling.low_turns,
            "high_freq_factor": scaling.high_turns,
            "original_max_position_embeddings": scaling.original_positions,
        }
    parameters = {"rope_theta": theta, **(written or {"rope_type": "default"})}
    return {
        "rope_theta": theta,
        "rope_scaling": written,
        "rope_parameters": parameters,
    }
