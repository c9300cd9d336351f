# SPDX-License-Identifier: Apache-2.0
"""Rows with targets that do not count: when they are packed, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.errors import BadInput
from hetjax.training.run_data import check_balance_loss, with_packing
from tests.runtime.random_plans import random_case
from tests.training.small import MODEL, small_preset


def test_experts_with_a_balance_loss_are_refused_for_rows_that_are_not_packed():
    with pytest.raises(BadInput, match="whose experts have a balance loss") as caught:
        check_balance_loss(random_case(2).model)
    assert caught.value.fix == "leave --data.pack out"
    check_balance_loss(random_case(1).model)


def test_rows_are_packed_and_texts_are_not_unless_somebody_says_so(tmp_path: Path):
    config = small_preset(tmp_path).config
    assert with_packing(config, MODEL, None).data.pack is False
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    for path, asked, expected in (
        (rows, None, True),
        (rows, False, False),
        (config.data.path, True, True),
    ):
        asking = replace(config, data=replace(config.data, path=path, pack=asked))
        assert with_packing(asking, MODEL, None).data.pack is expected
