# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama without RoPE in some blocks."""

from typing import Any

from hetjax.models.configs import LlamaConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import BLOCKS, Fields, Kind
from hetjax.models.families.shared.llama_fields import (
    read_biases,
    read_llama,
    read_windows,
    written_biases,
    written_llama,
    written_windows,
)
from hetjax.models.families.shared.tensor_rows import DENSE

_TURNS = "no_rope_layers"  # despite its name, 1 is a block with RoPE, 0 one without
_INTERVAL = "no_rope_layer_interval"


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(turns in (0, 1) for turns in value)


_KIND: Kind = (
    _are_numbers,
    "a list of 1 (with RoPE) and 0 (without), one for each block",
)


def _read(fields: Fields) -> LlamaConfig:
    turns = _turns(fields)
    windows = read_windows(fields, tuple(not with_rope for with_rope in turns))
    return read_llama(fields, rope_blocks=turns, **windows, **read_biases(fields))


def _turns(fields: Fields) -> tuple[bool, ...]:
    num_blocks, interval = fields["num_hidden_layers"], fields.get(_INTERVAL, 4)
    turns_given = fields.get(_TURNS)
    if turns_given is None:
        return tuple((block + 1) % interval != 0 for block in range(num_blocks))
    if len(turns_given) < num_blocks:
        fields.refuse(_TURNS, _KIND[1])
    return tuple(turns == 1 for turns in turns_given[:num_blocks])


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        **written_llama(config),
        **written_biases(config),
        **written_windows(config),
        "pad_token_id": None,  # that of transformers is past a smaller vocabulary
        _TURNS: [int(config.has_rope(block)) for block in range(config.num_blocks)],
    }


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=_read,
    write=_write,
    tensors=DENSE,
    kinds={_TURNS: _KIND, _INTERVAL: BLOCKS},
    left_out={
        "vocab_size": 128_256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    without_effect=("max_window_layers",),
    examples={
        "smollm3": {"no_rope_layers": [1, 0, 1]},
        "smollm3_window": {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "tie_word_embeddings": False,
        },
    },
)
