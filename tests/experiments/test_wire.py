# SPDX-License-Identifier: Apache-2.0
"""Two replicas send each gradient of a trained weight once, in the wire's precision."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.finetune.wire import (
    LORA,
    MODEL,
    WIRE_BYTES,
    Wire,
    step_bytes,
    trained_parameters,
)
from hetjax.models.decoders import model_of
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.model import parameter_count
from tests.short_runs import rows_drawn

SIZES: dict[str, Any] = dict(
    hidden_size=32, inner_size=48, num_blocks=2, num_heads=4, num_kv_heads=4
)
SMALL = replace(MODEL, vocab_size=384, **SIZES)


@pytest.mark.parametrize(
    ("lora", "wire"),
    rows_drawn(
        [(LORA, "bfloat16"), (LORA, "float32"), (LoraConfig(), "float32")], short=1
    ),
)
def test_two_replicas_send_what_is_trained_to_each_other_once_a_step(
    tmp_path: Path, lora: LoraConfig, wire: Wire
):
    model = model_of(SMALL)
    trained = with_adapters(model, lora) if lora.rank else model
    num_trained = sum(parameter_count(x, trained=True) for x in trained.layers)
    assert num_trained == trained_parameters(SMALL, lora.rank)
    sent_bytes = step_bytes(tmp_path / "run", SMALL, lora, wire)
    assert sent_bytes == 2 * WIRE_BYTES[wire] * num_trained
