# SPDX-License-Identifier: Apache-2.0
"""Planning uses Sailor's layer times as if they had been measured here.

Oracle: the numbers of the file.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import hetjax
from hetjax.cli.profile import profile
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import measured, read_profile
from hetjax.errors import BadInput

A100, V100 = "A100-SXM4-40GB", "V100-SXM2-16GB"
# of the preset tiny: embedding, four blocks, head
LAYERS = {"0": [1e-3, 2e-3, 3e-4], "5": [5e-3, 7e-3, 4e-4]}
LAYERS |= {str(n): [n * 1e-3, 2e-3 * n, 1e-4] for n in range(1, 5)}


def sailors(folder: Path, name: str, scale: float = 1.0, layers: Any = LAYERS) -> str:
    times = {layer: [scale * t for t in ts] for layer, ts in layers.items()}
    path = folder / name
    path.write_text(json.dumps({"4": {"1": times}}))
    return str(path)


def imported(folder: Path, *words: str) -> Path:
    output = folder / "p.json"
    profile(["tiny", "--output", str(output), *words])
    return output


def test_files_of_several_kinds_become_one_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    imported(tmp_path, "--sailor", sailors(tmp_path, "a"), "--device", A100)
    slow = sailors(tmp_path, "v", 3.0)
    output = imported(tmp_path, "--sailor", slow, "--device", "V100 SXM2 16GB")
    assert f"profile written to {output}" in capsys.readouterr().out
    found = read_profile(output)
    assert found.devices == {A100, V100} and found.dtype == "float32"
    assert found.layers == ("embedding", *["block"] * 4, "head")
    for kind, device, scale in (("A", A100, 1.0), ("V", V100, 3.0)):
        block = measured(
            found, device=device, kind="block", tensor=1, microbatch_size=4
        )
        assert block.forward_s == pytest.approx(scale * 2.5e-3), kind
        assert block.backward_s == pytest.approx(scale * 5e-3), kind
    # a second import replaces the first one of that kind of device
    imported(tmp_path, "--sailor", sailors(tmp_path, "b", 2.0), "--device", A100)
    assert len(read_profile(output).measurements) == 6
    alone = Cluster(name="one", nodes=(Node(name="one", device=A100, count=1),))
    step = hetjax.find_plan(
        "tiny",
        cluster=alone,
        profile=output,
        global_batch=4,
        microbatch_sizes=(4,),
        tensor=(1,),
        remat=("none",),
        quiet=True,
    )
    passes_s = sum(sum(times[:2]) for times in LAYERS.values())
    assert step.step_time_s == pytest.approx(2.0 * passes_s, rel=0.1)  # and updates


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--sailor without --device"),
        (["--device", "V100-16"], "--device V100-16"),
        (["--device", A100, "--dtype", "bfloat16"], "dtype = 'float32'"),
        (["--device", A100, "--seq-len", "32"], "seq_len = 64"),
    ],
)
def test_what_does_not_go_together_is_refused(
    words: list[str], told: str, tmp_path: Path
):
    file = sailors(tmp_path, "a")
    output = imported(tmp_path, "--sailor", file, "--device", A100)
    before = output.read_text()
    with pytest.raises(BadInput) as refused:
        imported(tmp_path, "--sailor", file, *words)
    assert told in refused.value.got
    assert output.read_text() == before


def test_times_of_another_model_and_a_device_alone_are_refused(tmp_path: Path):
    fewer = {str(n): [1.0, 1.0, 1.0] for n in range(5)}
    file = sailors(tmp_path, "a", layers=fewer)
    with pytest.raises(BadInput, match="with 5 layers"):
        imported(tmp_path, "--sailor", file, "--device", A100)
    with pytest.raises(BadInput, match="without --sailor"):
        imported(tmp_path, "--device", A100)
    assert not (tmp_path / "p.json").exists()
