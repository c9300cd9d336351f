# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates against `transformers` itself."""

import json
from pathlib import Path

import pytest

from tests.against_transformers.tokenizer_cases import (
    AROUND,
    CASES,
    FOLDER,
    TEMPLATES,
    case_of,
)
from tests.data.test_model_tokenizers import check_like_transformers


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_what_is_learnt_are_those_of_transformers(
    tmp_path: Path, name: str, around: str
):
    check_like_transformers(tmp_path, case_of(tmp_path, name, around))


@pytest.mark.parametrize(("name", "around"), CASES)
def test_what_is_committed_is_what_transformers_makes(
    tmp_path: Path, name: str, around: str
):
    committed = json.loads((FOLDER / name / "expected.json").read_text())
    assert case_of(tmp_path, name, around) == committed
