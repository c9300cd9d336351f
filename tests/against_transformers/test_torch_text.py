# SPDX-License-Identifier: Apache-2.0
"""Transformers generates as many tokens as asked for, and each is timed."""

from experiments.gpu.models.torch_text import measured


def test_seconds_are_of_the_first_new_token_and_of_the_last():
    found = measured("tiny", "float32", "cpu", prompt_tokens=16, new_tokens=8)
    assert 0 < found["prompt_s"] < found["whole_s"]
    assert found["peak_bytes"] is None
