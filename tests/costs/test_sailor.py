# SPDX-License-Identifier: Apache-2.0
"""Sailor's files become profiles."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetjax.costs.measured.layer_profile import measured, parse_profile, profile_json
from hetjax.costs.measured.sailor import sailor_profile
from hetjax.errors import BadInput

LAYERS = {
    "0": [0.5, 0.0, 0.25],
    "1": [1.0, 2.0, 0.25],
    "2": [3.0, 4.0, 0.75],
    "3": [2.0, 5.0, 1.5],
}
TIMES = {
    "1": {"1": LAYERS},
    "2": {"1": {layer: [2 * t for t in ts] for layer, ts in LAYERS.items()}},
}


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_layer_times_become_a_profile_with_the_mean_block(tmp_path: Path) -> None:
    path = written(tmp_path / "times.json", TIMES)
    profile = sailor_profile(path, model="OPT", device="GH-96", seq_len=2048)
    assert profile.layers == ("embedding", "block", "block", "head")
    assert (profile.model, profile.seq_len, profile.dtype) == ("OPT", 2048, "float32")
    expected = {
        "embedding": (0.5, 0.0, 0.25),
        "block": (2.0, 3.0, 0.5),
        "head": (2.0, 5.0, 1.5),
    }
    assert len(profile.measurements) == 6
    for kind, times in expected.items():
        for size in (1, 2):
            m = measured(
                profile, device="GH-96", kind=kind, tensor=1, microbatch_size=size
            )
            assert (m.forward_s, m.backward_s, m.update_s) == tuple(
                size * time for time in times
            )
    assert parse_profile(profile_json(profile)) == profile


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ([], "the file = []"),
        ({}, "no layer times"),
        ({"one": TIMES["1"]}, "microbatch 'one'"),
        ({"1": {"1": LAYERS | {"3": [1.0]}}}, "1.1.3 with 1 entries"),
        ({"1": {"1": LAYERS | {"3": [1, 2, "x"]}}}, "1.1.3 = 'x'"),
        ({"1": {"1": LAYERS | {"3": [1, -2, 3]}}}, "backward_s = -2"),
        (
            {"1": {"1": LAYERS}, "2": {"1": {"0": [1, 2, 3]}}},
            "1 layers at microbatch 2",
        ),
        ({"1": {"1": LAYERS | {"7": [1, 2, 3]}}}, "5 layers at microbatch 1"),
    ],
)
def test_a_file_that_is_not_sailors_is_refused(
    tmp_path: Path, content: Any, part: str
) -> None:
    path = written(tmp_path / "times.json", content)
    with pytest.raises(BadInput) as caught:
        sailor_profile(path, model="OPT", device="GH-96", seq_len=2048)
    assert part in caught.value.got
